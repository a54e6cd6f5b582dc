"""What engines read from a Hugging Face model folder: config, tensors by name, stop tokens.

Tensor names are those of the Transformers model class. A head tied to the embedding appears once,
under the embedding's name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_ray.errors import DataError, EngineError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_MARKED_BYTES = 2**20
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def model_folder(path: str | Path, key: str = "model.path", files: Sequence[str] = _WANTED) -> Path:
    """The local folder of a model: itself, or the hub's cached copy of a `name/model`.

    Args:
        path: Folder or hub name.
        key: Of the recipe, that names it.
        files: Patterns of those that are needed of the hub's.

    Raises:
        DataError: Neither a folder with a config.json nor a model the hub can deliver.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or len(folder.parts) != 2:
        raise DataError(
            f"{key}: {str(path)!r} holds no config.json; it must be a Hugging Face model "
            "folder or a hub name. Check the path, or set model.create to make the model first."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"{key}: {str(path)!r} is not a local folder and the hub did not deliver it "
            f"({type(error).__name__}). Download the model and give its folder."
        ) from error


def load_config(folder: Path) -> "PreTrainedConfig":
    """The model's Transformers config.

    Raises:
        DataError: The config is missing, broken or of an architecture Transformers lacks.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise DataError(
            f"model.path: the config.json in {folder} cannot be used: {first_line}. "
            "It must be a decoder-only model that Transformers knows."
        ) from error


def iterate_tensors(folder: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every tensor of the checkpoint's safetensors files, one at a time.

    Raises:
        DataError: No safetensors file, or one that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"model.path: {folder} holds no .safetensors file. Save the model with "
            "`save_pretrained` of a current Transformers."
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not iterable itself)
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise DataError(
                f"model.path: {file} cannot be read: {error}. Copy it again."
            ) from error


def weights_mark(folder: Path) -> str:
    """What tells one folder's weights from another's at once, however large: a digest of the files'
    names, sizes, first MiB (which names the tensors) and last MiB."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_MARKED_BYTES))
            opened.seek(max(0, size - _MARKED_BYTES))
            digest.update(opened.read())
    return f"weights {digest.hexdigest()[:16]}"


def load_tensors(folder: Path, config: "PreTrainedConfig") -> dict[str, "torch.Tensor"]:
    """All tensors by name; a tied head is left out, as `weight_shapes` of an engine does."""
    tensors = dict(iterate_tensors(folder))
    if is_head_tied(config):
        tensors.pop("lm_head.weight", None)
    return tensors


def is_head_tied(config: "PreTrainedConfig") -> bool:
    """Whether the output head is the input embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Every id that ends a turn: of generation config, model config and tokenizer, sorted."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            found.update(ids if isinstance(ids, list) else [ids])
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    for added in _read_json(folder / "tokenizer.json").get("added_tokens") or ():
        if added["content"] == text:
            found.add(added["id"])
    return tuple(sorted(found))


def token_difference(folder: Path, other: Path) -> str | None:
    """The first token id that two folders' tokenizers read differently, in words.

    Empty where all ids that both know mean the same; None where a folder has no tokenizer.json
    that tells.
    """
    one, two = folder / "tokenizer.json", other / "tokenizer.json"
    if not (one.is_file() and two.is_file()):
        return None
    if one.read_bytes() == two.read_bytes():
        return ""
    own, others = _known_tokens(one), _known_tokens(two)
    if not own or not others:
        return None
    wrong = min((i for i in own.keys() & others.keys() if own[i] != others[i]), default=None)
    return "" if wrong is None else f"token {wrong} as {others[wrong]!r}, not {own[wrong]!r}"


def _known_tokens(file: Path) -> dict[int, str]:
    """Of a tokenizer.json, token by id; empty where it cannot be read."""
    try:
        told = _read_json(file)
        listed = told.get("model", {}).get("vocab", {})
        if isinstance(listed, dict):
            known = {i: token for token, i in listed.items()}
        else:  # Unigram: pairs of token and score, in the order of their ids
            known = {i: token for i, (token, _) in enumerate(listed)}
        return known | {added["id"]: added["content"] for added in told.get("added_tokens") or ()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, "torch.Tensor"]
) -> None:
    """Refuse a set of tensors that is not exactly the expected one.

    Raises:
        EngineError: Names what is missing, extra or of another shape (the first three of each).
    """
    wrong_shape = [
        f"{name} is {tuple(tensors[name].shape)} and must be {tuple(expected[name])}"
        for name in expected.keys() & tensors.keys()
        if tuple(tensors[name].shape) != tuple(expected[name])
    ]
    problems = [
        f"{label} {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}"
        for label, names in (
            ("missing:", list(expected.keys() - tensors.keys())),
            ("not in the model:", list(tensors.keys() - expected.keys())),
            ("wrong shape:", wrong_shape),
        )
        if names
    ]
    if problems:
        raise EngineError(f"weights: {'; '.join(problems)}. Give the tensors of this very model.")
