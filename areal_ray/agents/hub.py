"""Rows of a data set on the Hugging Face hub, or of the hub's cache on this machine."""

from typing import Any

from areal_ray.errors import DataError

_TIMEOUT_S = 3.0


def read_hub(name: str, split: str, subset: str | None = None) -> list[dict[str, Any]]:
    """The rows of a split.

    Args:
        name: Of the data set, `owner/name`.
        split: Such as train or test.
        subset: Of a data set that has several.

    Raises:
        DataError: The package `datasets` is missing, or the hub does not answer.
    """
    try:
        from datasets import load_dataset
        from huggingface_hub import dataset_info
    except ImportError as error:
        raise DataError(
            f"loading '{name}' needs the package 'datasets', which is not installed. "
            "pip install datasets, or give path: a JSONL file"
        ) from error
    if not _is_cached(name):
        try:  # told in seconds: `datasets` itself tries for a minute
            dataset_info(name, timeout=_TIMEOUT_S)
        except Exception as error:  # whatever the hub client and its transports raise
            raise DataError(
                f"the hub does not answer for '{name}' ({type(error).__name__}). "
                "Give path: a JSONL file, or go online once to fill the cache"
            ) from error
    return [dict(row) for row in load_dataset(name, subset, split=split)]


def _is_cached(name: str) -> bool:
    from datasets.config import HF_DATASETS_CACHE

    return bool((HF_DATASETS_CACHE / name.replace("/", "___")).is_dir())
