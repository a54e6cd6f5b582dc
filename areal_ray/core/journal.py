"""The run's journal: an append-only record of what was committed and how each group ended.

`ledger.jsonl` holds one strict-JSON line an event, written by the driver. `groups-<writer>-<n>.seg`
hold the encoded groups themselves, written by whoever scored them, so that a committed group
survives the death of any one actor or node as long as the run folder does. A segment is deleted
once every group in it has ended.
"""

import json
import os
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from areal_ray.core.storage import writing
from areal_ray.errors import DataError

JOURNAL_FOLDER = "journal"
"""Of a run, in its folder."""
_LEDGER_FILE = "ledger.jsonl"
_SEGMENT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """Where a committed group's bytes lie in the run's journal."""

    segment: str
    offset: int
    num_bytes: int


class LedgerJournal:
    """Appends events to `ledger.jsonl`; a line is on its way to disk when `append` returns."""

    def __init__(self, folder: Path) -> None:
        path = self._path = folder / _LEDGER_FILE
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists():  # a line torn by a crash would take the next one with it
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Write one event.

        Raises:
            StorageError: The disk did not take it.
        """
        with writing(self._path):
            self._file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


def resumption(step: int, version: int) -> dict[str, Any]:
    """The event of a run that goes on from the checkpoint after `step`.

    What stands before it about later steps was forgotten: those steps are taken again.
    """
    return {"event": "resumed", "step": step, "version": version, "at_s": time.time()}


def resumption_lines(folder: Path) -> list[str]:
    """A line for each time the run was resumed."""
    return [
        f"after step {record['step']}, at version {record['version']}, on "
        + time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record["at_s"]))
        for record in read_ledger(folder)
        if record["event"] == "resumed"
    ]


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """All whole events of a journal; a last line cut short by a crash is left out.

    Raises:
        DataError: A line is no JSON object; names it.
    """
    path = folder / _LEDGER_FILE
    if not path.exists():
        return []
    events = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line.decode())
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(event, dict) or "event" not in event:
            raise DataError(f"{path}: line {number} is no event; must say which")
        events.append(event)
    return events


class SegmentWriter:
    """Appends encoded groups to segment files of one writer."""

    def __init__(self, folder: Path, writer: str, *, segment_bytes: int = _SEGMENT_BYTES) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._writer, self._segment_bytes = folder, writer, segment_bytes
        self._file: BinaryIO | None = None
        self._name = ""
        self._next = 0

    def append(self, payload: bytes | memoryview) -> JournalPlace:
        """Write one encoded group and say where it lies.

        Raises:
            StorageError: The disk did not take it.
        """
        if self._file is None or self._file.tell() >= self._segment_bytes:
            with writing(self._folder):
                self._open_next()
        assert self._file is not None
        with writing(self._folder / self._name):
            offset = self._file.tell()
            self._file.write(zlib.crc32(payload).to_bytes(4, "little"))
            self._file.write(payload)
            self._file.flush()
        return JournalPlace(self._name, offset, len(payload))

    def close(self) -> None:
        """Close the current segment."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_next(self) -> None:
        self.close()
        # Numbers only rise, whatever was deleted meanwhile: the keeper takes the highest for the
        # one still written to, and a restarted writer must not touch what its predecessor left.
        there = self._folder.glob(f"groups-{self._writer}-*.seg")
        numbers = [int(path.stem.rsplit("-", 1)[1]) for path in there]
        number = max(self._next, 1 + max(numbers, default=-1))
        self._next = number + 1
        self._name = f"groups-{self._writer}-{number:06d}.seg"
        self._file = (self._folder / self._name).open("xb")


def read_group_bytes(folder: Path, place: JournalPlace) -> bytes:
    """The encoded group that lies at `place`.

    Raises:
        ValueError: The segment is gone, cut short or damaged there.
    """
    path = folder / place.segment
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            checksum, payload = file.read(4), file.read(place.num_bytes)
    except OSError as error:
        raise ValueError(f"journal segment {path} cannot be read: {error}") from error
    if len(payload) != place.num_bytes or zlib.crc32(payload).to_bytes(4, "little") != checksum:
        raise ValueError(f"journal segment {path} is damaged at byte {place.offset}")
    return payload


class SegmentKeeper:
    """Knows which segments still hold a group that has not ended, and deletes the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._live: Counter[str] = Counter()
        self._newest: dict[str, str] = {}

    def hold(self, place: JournalPlace) -> None:
        """A group at `place` was committed."""
        self._live[place.segment] += 1
        writer = place.segment.rsplit("-", 1)[0]
        self._newest[writer] = max(self._newest.get(writer, ""), place.segment)

    def let_go(self, place: JournalPlace) -> None:
        """The group at `place` ended; delete its writer's full segments in which all have ended.

        All of them, since the last group of a segment may end before its writer begins another.
        """
        self._live[place.segment] -= 1
        writer = place.segment.rsplit("-", 1)[0]
        for segment in [name for name, count in self._live.items() if count <= 0]:
            if segment.rsplit("-", 1)[0] == writer and self._newest[writer] != segment:
                del self._live[segment]
                (self._folder / segment).unlink(missing_ok=True)
