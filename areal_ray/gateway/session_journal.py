"""The sessions' journal: framed, checksummed records in segment files of one replica.

A record is on its way to disk when `append` returns, so that it survives the process; `settled`
waits until it survives the machine. Segments are deleted from the oldest on, so that what a later
record says of an earlier one is never forgotten first.
"""

import asyncio
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from areal_ray.core.storage import writing

_log = logging.getLogger(__name__)

_MAGIC = b"ARS1"
_FRAME = struct.Struct("<4sII")  # magic, length of the payload, its checksum
_HEAD = struct.Struct("<I")  # length of the JSON head
SEGMENT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One record: a JSON head, and bytes."""

    head: Mapping[str, Any]
    body: bytes | memoryview = b""

    def packed(self) -> bytes:
        """As the payload of a frame."""
        text = json.dumps(self.head, separators=(",", ":"), allow_nan=False).encode()
        return b"".join((_HEAD.pack(len(text)), text, self.body))


def unpack_record(payload: bytes | memoryview) -> JournalRecord:
    """Inverse of `JournalRecord.packed`.

    Raises:
        ValueError: The payload is none.
    """
    try:
        (length,) = _HEAD.unpack_from(payload)
        place = _HEAD.size + length
        head = json.loads(bytes(payload[_HEAD.size : place]))
        if place > len(payload) or type(head) is not dict:
            raise ValueError("its head is cut short or no object")
    except (struct.error, ValueError) as error:
        raise ValueError(f"journal record cannot be read: {error}") from error
    return JournalRecord(head, payload[place:])


def pack_many(records: Sequence[JournalRecord]) -> bytes:
    """Several records as the body of one, so that all of them are there or none."""
    pieces: list[bytes] = []
    for record in records:
        payload = record.packed()
        pieces += (_HEAD.pack(len(payload)), payload)
    return b"".join(pieces)


def unpack_many(body: bytes | memoryview) -> list[JournalRecord]:
    """Inverse of `pack_many`."""
    records, at = [], 0
    while at < len(body):
        (length,) = _HEAD.unpack_from(body, at)
        at += _HEAD.size
        records.append(unpack_record(body[at : at + length]))
        at += length
    return records


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


class SessionJournal:
    """Appends to the journal of one replica, and reads it after a restart.

    Args:
        folder: Shared by all replicas.
        name: Of the replica.
        segment_bytes: A file that has more is followed by another.

    Raises:
        StorageError: The folder cannot be written.
    """

    def __init__(self, folder: Path, name: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._folder = folder
        self._prefix = f"sessions-{name}-"
        self.segment_bytes = segment_bytes
        self._sizes: dict[int, int] = {}
        """Bytes of each segment, the oldest first."""
        for path in sorted(folder.glob(f"{self._prefix}*.seg")):
            self._sizes[int(path.stem.rsplit("-", 1)[1])] = path.stat().st_size
        self._number = max(self._sizes, default=-1)
        self._file: BinaryIO | None = None
        self._num_appended = 0
        self._num_settled = 0
        self._last_moved = 0
        """Number of the last record that takes the place of older ones."""
        self._unsettled: list[int] = []
        """Descriptors of full segments that are not on disk yet."""
        self._settling: asyncio.Task[None] | None = None
        self.damages: list[str] = []
        """What `read` could not: file, offset and length."""

    @property
    def number(self) -> int:
        """Of the segment that is written to."""
        return self._number

    @property
    def oldest(self) -> int:
        """Of the oldest segment that is there."""
        return min(self._sizes, default=self._number)

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return sum(self._sizes.values())

    def append(self, record: JournalRecord, *, is_moved: bool = False) -> int:
        """Write one record; returns its bytes.

        Args:
            record: What to write.
            is_moved: Whether it says again what older ones said, which then may be deleted.

        Raises:
            StorageError: The disk did not take it.
        """
        if self._file is None or self._sizes[self._number] >= self.segment_bytes:
            self._open_next()
        assert self._file is not None
        frame = _framed(record.packed())
        self._num_appended += 1
        if is_moved:
            self._last_moved = self._num_appended
        with writing(self._path(self._number)):
            self._file.write(frame)
            self._file.flush()
        self._sizes[self._number] += len(frame)
        return len(frame)

    async def settled(self) -> None:
        """Return once all that was appended before the call is on disk.

        Waits for: the disk, in a thread; who calls meanwhile shares the next turn.

        Raises:
            StorageError: The disk did not take it.
        """
        wanted = self._num_appended
        while self._num_settled < wanted:
            if self._settling is None:
                self._settling = asyncio.create_task(self._settle())
            await asyncio.shield(self._settling)

    def delete_before(self, number: int) -> None:
        """Delete the segments older than `number`, once what was moved from them is on disk."""
        if self._num_settled < self._last_moved:
            return
        for old in [one for one in self._sizes if one < number]:
            del self._sizes[old]
            self._path(old).unlink(missing_ok=True)

    def read(self) -> Iterator[tuple[int, int, JournalRecord]]:
        """What earlier processes wrote: segment, bytes, record, in their order.

        A last record that a crash cut short is cut off. A damaged one is told in `damages` and
        in the log; what follows it is read.
        """
        for number in list(self._sizes):
            path = self._path(number)
            frames = _Frames(path.read_bytes())
            for size, payload in frames.good():
                try:
                    yield number, size, unpack_record(payload)
                except ValueError:
                    frames.damages.append((-1, size))
            if frames.torn_at is not None:
                _log.info("%s: a last record that was cut short is cut off", path)
                with writing(path):
                    os.truncate(path, frames.torn_at)
                self._sizes[number] = frames.torn_at
            for offset, length in frames.damages:
                damage = f"{path}: {length} bytes at offset {offset} are damaged"
                self.damages.append(damage)
                _log.error("%s; what follows them is read", damage)

    def close(self) -> None:
        """Close the files; what was written is on its way to disk."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for descriptor in self._unsettled:
            os.close(descriptor)
        self._unsettled.clear()

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._prefix}{number:06d}.seg"

    def _open_next(self) -> None:
        path = self._path(self._number + 1)
        with writing(path):
            if self._file is not None:
                self._unsettled.append(os.dup(self._file.fileno()))
                self._file.close()
                self._file = None
            self._file = path.open("xb")
        self._number += 1
        self._sizes[self._number] = 0

    async def _settle(self) -> None:
        try:
            wanted = self._num_appended
            descriptors, self._unsettled = self._unsettled, []
            if self._file is not None:
                descriptors.append(os.dup(self._file.fileno()))
            with writing(self._path(self._number)):
                await asyncio.to_thread(_to_disk, descriptors)
            self._num_settled = wanted
        finally:
            self._settling = None


def _to_disk(descriptors: Sequence[int]) -> None:
    try:
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class _Frames:
    """The frames of a buffer, and what in it is none."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._buffer = memoryview(raw)
        self.damages: list[tuple[int, int]] = []
        """Offset and length."""
        self.torn_at: int | None = None
        """Where a last frame begins that does not end."""

    def good(self) -> Iterator[tuple[int, memoryview]]:
        """Size and payload of each whole frame."""
        at, total = 0, len(self._buffer)
        while at < total:
            payload = self._payload(at)
            if payload is None:
                following = self._next(at + 1)
                if following < total:
                    self.damages.append((at, following - at))
                elif self._is_torn(at):
                    self.torn_at = at
                else:
                    self.damages.append((at, total - at))
                at = following
                continue
            size = _FRAME.size + len(payload)
            yield size, payload
            at += size

    def _payload(self, at: int) -> memoryview | None:
        if len(self._buffer) - at < _FRAME.size:
            return None
        magic, length, checksum = _FRAME.unpack_from(self._buffer, at)
        payload = self._buffer[at + _FRAME.size : at + _FRAME.size + length]
        is_whole = magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == checksum
        return payload if is_whole else None

    def _next(self, start: int) -> int:
        """Where the next whole frame begins; the buffer's length if there is none."""
        at = self._raw.find(_MAGIC, start)
        while at >= 0 and self._payload(at) is None:
            at = self._raw.find(_MAGIC, at + 1)
        return at if at >= 0 else len(self._raw)

    def _is_torn(self, at: int) -> bool:
        left = len(self._buffer) - at
        if left < _FRAME.size:
            return True
        magic, length, _ = _FRAME.unpack_from(self._buffer, at)
        return bool(magic == _MAGIC and left < _FRAME.size + length)
