"""The quick reading of a config.json says what Transformers says, or nothing."""

import json
import subprocess
import sys

import pytest

from areal_ray.engines.model_files import load_config
from areal_ray.engines.saved_config import read_saved_config
from tests.support.tiny_models import write_tiny_model

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
READ = (
    "model_type", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
READ_WHERE_PRESENT = ("attention_bias", "mlp_bias", "head_dim", "sliding_window", "layer_types")


@pytest.mark.parametrize("architecture", FAMILY)
def test_it_says_what_transformers_says(tmp_path, architecture):
    folder = write_tiny_model(tmp_path, architecture)
    quick, full = read_saved_config(folder), load_config(folder)
    assert quick is not None
    for name in READ:
        assert getattr(quick, name) == getattr(full, name), name
    for name in READ_WHERE_PRESENT:
        if hasattr(quick, name) and getattr(quick, name) is not None:
            assert getattr(quick, name) == getattr(full, name), name
    assert getattr(quick, "sliding_window", None) == getattr(full, "sliding_window", None)


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "4.57.0"},  # left out defaults, named rope_theta elsewhere
        {"transformers_version": None},
        {"model_type": "gemma"},
        {"rope_parameters": {"rope_type": "default"}},
    ],
)
def test_a_file_that_may_lack_something_is_left_to_transformers(tmp_path, change):
    folder = write_tiny_model(tmp_path, "qwen3")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert read_saved_config(folder) is None


def test_a_file_without_a_needed_value_or_without_sense_is_left_to_transformers(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3")
    file = folder / "config.json"
    said = json.loads(file.read_text())
    del said["head_dim"]
    file.write_text(json.dumps(said))
    assert read_saved_config(folder) is None
    for text in ("{", "[]", ""):
        file.write_text(text)
        assert read_saved_config(folder) is None
    file.unlink()
    assert read_saved_config(folder) is None


def test_the_generation_engine_starts_without_transformers(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3")
    script = (
        "import sys; from areal_ray.engines.torch_generation import TorchGenerationEngine; "
        "from areal_ray.engines.torch_generation_config import TorchGenerationConfig; "
        f"TorchGenerationEngine({str(folder)!r}, TorchGenerationConfig()); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
