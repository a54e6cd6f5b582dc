"""Writes a model as a folder that Hugging Face's Auto classes load."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

from areal_ray.core.storage import refused, writing
from areal_ray.engines.deepspeed_device import name_device
from areal_ray.engines.model_files import model_folder

UNREADABLE = (OSError, RuntimeError, KeyError, ValueError, EOFError, UnpicklingError)
"""What reading a training state raises that is damaged, or of another model."""
_GENERATION = "generation_config.json"
_BESIDE_WEIGHTS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    _GENERATION,
)


def why_unreadable(error: Exception) -> str:
    """One of `UNREADABLE` in a line."""
    if isinstance(error, UnpicklingError):  # whose text is advice to read it without care
        return "it is damaged"
    return " ".join(str(error).split()) or "it ends too early"


@dataclass(frozen=True, slots=True)
class ModelExtras:
    """What a model folder holds beside weights and config: tokenizer, chat template.

    Read at the start and kept: the folder may be a checkpoint that is removed during the run.
    Written back as they are: saving a loaded tokenizer may change how it splits.
    """

    files: dict[str, bytes]
    """By path inside the folder."""

    @classmethod
    def read(cls, source: Path | str) -> Self:
        """From a folder, or from the hub where `source` is a name there."""
        home = Path(source)
        if not home.is_dir():
            home = model_folder(source, files=_BESIDE_WEIGHTS)
        found = {file for pattern in _BESIDE_WEIGHTS for file in home.glob(pattern)}
        return cls(
            {
                file.relative_to(home).as_posix(): file.read_bytes()
                for file in sorted(found)
                if file.is_file()
            }
        )

    def export(self, model: Any, weights: Mapping[str, Any], folder: Path) -> None:
        """Save weights and config of a Hugging Face model with these files; makes the folder.

        `weights`: its parameters and persistent buffers, tied ones once.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name_device()
        with _not_saving_generation_config(model, is_kept=_GENERATION in self.files):
            model.save_pretrained(folder, state_dict=dict(weights))
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


@contextmanager
def _not_saving_generation_config(model: Any, *, is_kept: bool) -> Iterator[None]:
    """Transformers loads generation configs that it then refuses to save: those with a temperature
    and without sampling, as of Llama 2. Where the file itself is kept, nothing needs saving."""
    own = getattr(model, "generation_config", None)
    if own is None or not is_kept:
        yield
        return
    model.generation_config = type(own)()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Around what writes weights and states into `folder`.

    Raises:
        StorageError: The disk did not take them, in whatever words the writer says so.
    """
    from safetensors import SafetensorError

    try:
        with writing(folder):
            yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # not torch's file writer
        raise refused(folder, " ".join(str(error).split())[:200]) from error
