"""Writes a model as a folder that Hugging Face's Auto classes load."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal_ray.core.storage import refused, writing

_BESIDE_WEIGHTS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class ModelExtras:
    """What a model folder holds beside weights and config: tokenizer, chat template.

    Read at the start and kept: the folder may be a checkpoint that is removed during the run.
    Written back as they are: saving a loaded tokenizer may change how it splits.
    """

    files: dict[str, bytes]
    source: str
    """Hub name to load the tokenizer from where there is no folder; else empty."""

    @classmethod
    def read(cls, source: Path | str) -> Self:
        """From a folder; a hub name is looked up when exporting."""
        home = Path(source)
        if not home.is_dir():
            return cls({}, str(source))
        found = {file for pattern in _BESIDE_WEIGHTS for file in home.glob(pattern)}
        return cls({file.name: file.read_bytes() for file in sorted(found) if file.is_file()}, "")

    def export(self, model: Any, weights: Mapping[str, Any], folder: Path) -> None:
        """Save weights and config of a Hugging Face model with these files; makes the folder.

        `weights`: its parameters and persistent buffers, tied ones once.
        """
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=dict(weights))
        if self.source:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(self.source).save_pretrained(folder)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


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
