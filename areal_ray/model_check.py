"""Whether a folder holds a whole Hugging Face checkpoint, by its files alone: no torch, no loading.

What is found here would otherwise come out minutes later, in an actor.
"""

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_ray.engines.lora_config import LoraConfig, layers_in
from areal_ray.engines.tensor_styles import KEY as SPLIT_KEY
from areal_ray.engines.tensor_styles import SEQUENCE_KEY, sequence_problems, split_problems
from areal_ray.engines.train_config import FsdpConfig, TrainEngineConfig
from areal_ray.errors import RecipeError

_HEADER_BYTES = 8
"""A safetensors file begins with the length of its header."""


def read_model_config(folder: Path) -> dict[str, Any] | str:
    """A checkpoint's config, or why it cannot be read."""
    config = _read_json(folder / "config.json")
    return config if isinstance(config, dict | str) else "not a mapping"


def checkpoint_problems(
    folder: Path, where: str, *, needs_tokenizer: bool = False
) -> Iterator[str]:
    """What keeps the checkpoint from being loaded, one line each.

    Args:
        folder: One with a config.json.
        where: The recipe key, for messages.
        needs_tokenizer: A tokenizer and its chat template are read from it too.
    """
    config = read_model_config(folder)
    if isinstance(config, str):
        yield f"{where}: {folder}/config.json cannot be read ({config})."
        return
    yield from (f"{where}: {problem}" for problem in _weight_problems(folder))
    if needs_tokenizer:
        yield from (f"{where}: {problem}" for problem in _tokenizer_problems(folder))


def rank_problems(
    engine: TrainEngineConfig, folders: Iterable[Path], *, has_adapters: bool
) -> Iterator[str]:
    """What keeps neighbouring ranks from computing models together, one line each.

    Args:
        engine: Says how many do, and how.
        folders: Of the models; those without a config.json are passed over.
        has_adapters: The policy has.
    """
    width = engine.ranks_per_share
    if not isinstance(engine, FsdpConfig) or width == 1:
        return
    key = SPLIT_KEY if engine.tensor_parallel > 1 else SEQUENCE_KEY
    if has_adapters and key == SPLIT_KEY:
        yield (
            f"{key}: is {width} with model.lora; must be 1, since adapters are not split. "
            "Set it to 1, or remove model.lora."
        )
    for folder in folders:
        if not (folder / "config.json").is_file():
            continue
        problems = split_problems if key == SPLIT_KEY else sequence_problems
        try:
            yield from problems(folder, width)
        except (OSError, ValueError, KeyError) as error:
            yield f"{key}: {folder}/config.json cannot be read ({error})."


def lora_problems(config: LoraConfig, folder: Path | None, package: str = "peft") -> Iterator[str]:
    """What keeps adapters from being trained, one line each.

    Args:
        config: What the recipe says of them.
        folder: One with a sound checkpoint; None where the model is not here yet.
        package: What trains them.
    """
    if find_spec(package) is None:
        yield (
            f"model.lora: is given, and the package {package} is not installed. Install it: "
            "pip install 'areal-ray[lora]'."
        )
    if folder is None:
        return
    try:
        config.adapted(layers_in(_tensor_shapes(folder)))
    except RecipeError as error:
        yield str(error)


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """By name, from the headers of the checkpoint's files."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_HEADER_BYTES), "little")
            header = json.loads(opened.read(length))
        shapes |= {name: entry["shape"] for name, entry in header.items() if "shape" in entry}
    return shapes


def _weight_problems(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield f"{folder} holds no .safetensors file; must be a whole checkpoint."
    index = _read_json(folder / "model.safetensors.index.json")
    if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        named = {folder / str(file) for file in index["weight_map"].values()}
        missing = sorted(path.name for path in named if not path.is_file())
        if missing:
            yield f"{folder} lacks {', '.join(missing[:3])}; its index names it. Copy it anew."
    for file in files:
        problem = _size_problem(file)
        if problem:
            yield f"{file} {problem}. Copy it anew."


def _size_problem(file: Path) -> str:
    """How a safetensors file differs from what its header says; empty where it does not."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_HEADER_BYTES), "little")
        if size < _HEADER_BYTES or length > size - _HEADER_BYTES:
            return f"is cut short: it has {size} bytes"
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return "is no safetensors file"
    whole = _HEADER_BYTES + length + max(ends, default=0)
    return "" if size == whole else f"has {size} bytes; must have {whole}"


def _tokenizer_problems(folder: Path) -> Iterator[str]:
    names = ("tokenizer.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in names):
        yield f"{folder} holds no tokenizer. Save the tokenizer beside the weights."
        return
    tokenizer = _read_json(folder / "tokenizer.json")
    if (folder / "tokenizer.json").is_file() and isinstance(tokenizer, str):
        yield f"{folder}/tokenizer.json cannot be read ({tokenizer})."
    if not _has_template(folder):
        yield (
            f"{folder} has no chat template. Use an instruction-tuned checkpoint, or put a "
            "chat_template.jinja beside its tokenizer."
        )


def _has_template(folder: Path) -> bool:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return bool(jinja.read_text(encoding="utf-8", errors="replace").strip())
    if (folder / "additional_chat_templates").is_dir() or (folder / "chat_template.json").is_file():
        return True
    config = _read_json(folder / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _read_json(file: Path) -> Any:
    """Its value, or why it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return str(error)
