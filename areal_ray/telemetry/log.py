"""Logging of a run: log.txt takes everything, the console warnings alone; secrets are blotted out.

The environment is read elsewhere (cli, runtime/cluster); this module gets the secret values.
"""

import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from areal_ray.core.storage import writing
from areal_ray.telemetry.terminal import printable

LOG_FILE = "log.txt"
REDACTED = "[redacted]"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|BEARER|WEBHOOK", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_SHORTEST_SECRET = 6  # shorter values ("1", "true") would blot out ordinary text
_PACKAGE = "areal_ray"


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """Values of the variables whose names look like a key, token, secret or password, and the
    passwords in the URLs of all others (proxies, databases)."""
    named = [value for name, value in environment.items() if _SECRET_NAME.search(name)]
    within = [word for value in environment.values() for word in _URL_WITH_PASSWORD.findall(value)]
    return frozenset(value for value in named + within if len(value) >= _SHORTEST_SECRET)


def redact(text: str, secrets: Iterable[str]) -> str:
    """The text with each secret replaced; for logs, saved recipes and exported episodes."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, REDACTED)
    return text


def redact_all(value: Any, secrets: Collection[str]) -> Any:
    """The same plain value with each secret replaced in every text within it."""
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, Mapping):
        return {name: redact_all(item, secrets) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item, secrets) for item in value]
    return value


class RunFormatter(logging.Formatter):
    """One event a line with run and actor; tracebacks and arguments are redacted too."""

    def __init__(self, run: str, actor: str, secrets: Iterable[str] = ()) -> None:
        place = f"{run} {actor}".replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname)-7s {place} %(module)s: %(message)s")
        self._secrets = frozenset(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """The line, redacted as a whole, with nothing in it that a terminal would obey."""
        return printable(redact(super().format(record), self._secrets))


class _CurrentStderr:
    """What sys.stderr is when a line is written: the live table stands in for it for a while."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class _OfRun(logging.Filter):
    """Passes the lines of one run, and those of code that belongs to none."""

    def __init__(self, key: object) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        return _writing.get() in (self._key, None)


_writing: ContextVar[object] = ContextVar("areal_ray_run", default=None)
"""Which run the code at hand works for: set in a run's thread, inherited by its tasks."""


class _LogFile(logging.FileHandler):
    """Says nothing of lines that the disk did not take: a run tells a full disk by its own files.

    By default each such line would leave a traceback on the console.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        """Leave the line out."""

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            super().close()


@contextmanager
def run_log(folder: Path, *, run: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Send what this thread and its tasks log to log.txt in `folder`, warnings to the console too.

    Runs of one process keep apart, side by side or one within the other. A thread that the run
    starts must be given its context (`contextvars.copy_context`).

    Raises:
        StorageError: log.txt cannot be written.
    """
    with writing(folder / LOG_FILE):
        folder.mkdir(parents=True, exist_ok=True)
        file = _LogFile(folder / LOG_FILE, encoding="utf-8")
    key = object()
    console = logging.StreamHandler(_CurrentStderr())
    console.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [console, file]
    logger = logging.getLogger(_PACKAGE)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        handler.setFormatter(RunFormatter(run, "driver", secrets))
        handler.addFilter(_OfRun(key))
        logger.addHandler(handler)
    outer = _writing.set(key)
    try:
        yield
    finally:
        _writing.reset(outer)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
