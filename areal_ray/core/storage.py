"""Writing the files of a run: what the disk refuses becomes one error that names the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_ray.errors import StorageError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes `path`.

    Raises:
        StorageError: The operating system refused it.
    """
    try:
        yield
    except OSError as error:
        raise refused(path, error.strerror or str(error)) from error


def refused(path: Path, reason: str) -> StorageError:
    """The error of a file or folder that could not be written."""
    return StorageError(
        f"{path}: cannot be written: {reason}. Make room there, or set cluster.fileroot to a "
        "folder that can be written"
    )


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        StorageError: The operating system refused it; what was there before still is.
    """
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
