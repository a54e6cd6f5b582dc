"""Writes a model as a folder that Hugging Face's Auto classes load."""

import shutil
from pathlib import Path
from typing import Any

_BESIDE_WEIGHTS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def export_model(model: Any, source: Path | str, folder: Path) -> None:
    """Save weights and config of `model`, with tokenizer and chat template of `source`.

    Tokenizer files are copied as they are: saving a loaded tokenizer may change how it splits.

    Args:
        model: A Hugging Face model.
        source: Where it was loaded from: a folder, or a name on the hub.
        folder: Made when missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    home = Path(source)
    if not home.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    for pattern in _BESIDE_WEIGHTS:
        for file in sorted(home.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
