"""A model's config read from its own file, where that says everything: without Transformers.

Importing Transformers' configs costs each rollout process three to four seconds of CPU, more than
all else of its start. A file that a current Transformers wrote for a model of the lean family names
every value that this package reads; any other file is left to `model_files.load_config`.
"""

import json
from pathlib import Path
from types import SimpleNamespace

_ALWAYS = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)
_BY_FAMILY = {
    "llama": ("attention_bias", "head_dim", "mlp_bias"),
    "qwen2": ("sliding_window",),
    "qwen3": ("attention_bias", "head_dim", "sliding_window"),
    "mistral": ("head_dim", "sliding_window"),
}
_WRITER = "5."
"""First characters of the Transformers version whose files are complete."""


def read_saved_config(folder: Path) -> SimpleNamespace | None:
    """The values of `folder`'s config.json under Transformers' names; None if it may lack some."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever reads it next says what is wrong with it
    family = said.get("model_type") if isinstance(said, dict) else None
    if family not in _BY_FAMILY or not str(said.get("transformers_version", "")).startswith(
        _WRITER
    ):
        return None
    needed = (*_ALWAYS, *_BY_FAMILY[family])
    if any(name not in said for name in needed) or "rope_theta" not in said["rope_parameters"]:
        return None
    return SimpleNamespace(**{"dtype": None, "layer_types": None, **said})
