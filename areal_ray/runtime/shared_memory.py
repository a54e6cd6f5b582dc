"""Weights that members on the learner's own node read out of its memory, past the network.

The learner keeps each version in a memory file, and offers a *board* beside it: a few words that
say which version is being written, where, and how many of its buckets are whole. Another process
opens both through /proc. What proves that it is the same node is that it finds the board's random
token there; where it does not (another node, another container, no /proc), bytes take the wire.

Waits: `BoardReader.wait_*`, for the learner; they end at their limit, when the learner gives the
sending up, and when its process ends.
"""

import mmap
import os
import secrets
import select
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TOKEN_BYTES = 16
_BOARD_BYTES = 64
_SENDING, _VERSION, _BUFFER_FD, _BUFFER_BYTES, _WHOLE_BUCKETS, _IS_OVER = range(6)
"""Words of the board, after the token."""

_SHORTEST_SLEEP_S = 0.0001
_LONGEST_SLEEP_S = 0.002
_LIFE_SIGN_S = 0.05
"""How often a waiting reader looks whether the learner's process is still there."""


class SharedBuffer:
    """Host memory of one version, which other processes of this node can read."""

    fd = -1
    """Of its memory file; -1 where this system has none: then nobody else can read it."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = _memory_file(num_bytes)
        self.array: NDArray[np.uint8]
        """[num_bytes], zeroed."""
        if self.fd < 0:
            self.array = np.zeros(num_bytes, np.uint8)
        else:
            self.array = _mapped(self.fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Board:
    """The learner's side."""

    def __init__(self) -> None:
        """One for each group, so that nobody of an earlier one can mistake what it says."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory = SharedBuffer(_BOARD_BYTES)
        self._memory.array[:_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)
        self._words = self._memory.array[_TOKEN_BYTES:].view(np.int64)

    @property
    def offer(self) -> str:
        """What another process needs to open it; empty where it cannot be opened."""
        fd = self._memory.fd
        return "" if fd < 0 else f"{os.getpid()} {fd} {self._token.hex()}"

    def begin(self, version: int, buffer: SharedBuffer) -> None:
        """A version is about to be written into a buffer."""
        self._words[_WHOLE_BUCKETS] = 0
        self._words[_VERSION] = version
        self._words[_BUFFER_FD] = buffer.fd
        self._words[_BUFFER_BYTES] = len(buffer.array)
        self._words[_SENDING] += 1  # last: this is what readers wait for

    def advance(self, whole_buckets: int) -> None:
        """So many buckets of it are whole."""
        self._words[_WHOLE_BUCKETS] = whole_buckets

    def give_up(self) -> None:
        """Nothing more will come: whoever waits learns it at once."""
        self._words[_IS_OVER] = 1


class BoardReader:
    """The side of another process on the same node."""

    def __init__(self, pid: int, board_fd: int, token: bytes) -> None:
        """Raises OSError or ValueError where this is not the node of the offer."""
        self._pid = pid
        board = _opened(pid, board_fd, _BOARD_BYTES)
        if board[:_TOKEN_BYTES].tobytes() != token:
            raise ValueError("another process's memory")
        self._words = board[_TOKEN_BYTES:].view(np.int64)
        self._alive = os.pidfd_open(pid)
        self._num_begun = 0
        self._buffers: dict[tuple[int, int], NDArray[np.uint8]] = {}

    @classmethod
    def of(cls, offer: str) -> "BoardReader | None":
        """A reader of the offered board; None where it lies on another node."""
        try:
            pid, fd, token = offer.split()
            return cls(int(pid), int(fd), bytes.fromhex(token))
        except (OSError, ValueError, AttributeError):  # no pidfd_open in this Python
            return None

    def wait_begin(self, version: int, limit_s: float) -> NDArray[np.uint8]:
        """The buffer that the next version is written into, not to be read beyond whole buckets.

        Raises:
            TimeoutError: The learner did not begin in time.
            ConnectionError: It gave up, its process ended, or it sends another version.
        """
        self._num_begun += 1
        self._wait(lambda: int(self._words[_SENDING]) >= self._num_begun, limit_s)
        sent = int(self._words[_VERSION])
        if sent != version or int(self._words[_SENDING]) != self._num_begun:
            raise ConnectionError(f"the learner sends version {sent}, not {version}")
        fd = int(self._words[_BUFFER_FD])
        try:
            place = fd, os.stat(f"/proc/{self._pid}/fd/{fd}").st_ino  # a number is used again
            if place not in self._buffers:
                self._buffers[place] = _opened(self._pid, fd, int(self._words[_BUFFER_BYTES]))
        except (OSError, ValueError) as error:
            raise ConnectionError(f"the learner's memory cannot be read: {error}") from error
        return self._buffers[place]

    def wait_bucket(self, bucket: int, limit_s: float) -> None:
        """Until a bucket is whole.

        Raises:
            TimeoutError: It was not in time.
            ConnectionError: The learner gave up or its process ended.
        """
        self._wait(lambda: int(self._words[_WHOLE_BUCKETS]) > bucket, limit_s)

    def close(self) -> None:
        """Let go of the learner's memory."""
        self._buffers.clear()
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def _wait(self, is_there: Callable[[], bool], limit_s: float) -> None:
        started_s = looked_s = time.monotonic()
        sleep_s = _SHORTEST_SLEEP_S
        while not is_there():
            if self._words[_IS_OVER]:
                raise ConnectionError("the learner gave up")
            now_s = time.monotonic()
            if now_s - started_s > limit_s:
                raise TimeoutError(f"timed out after {limit_s:g} s")
            if now_s - looked_s > _LIFE_SIGN_S:
                looked_s = now_s
                if select.select([self._alive], [], [], 0)[0]:
                    raise ConnectionError("the learner's process ended")
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.1, _LONGEST_SLEEP_S)


def _memory_file(num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create("areal-ray-weights", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(num_bytes, 1))
    return fd


def _opened(pid: int, fd: int, num_bytes: int) -> NDArray[np.uint8]:
    """Another process's memory file, to be read."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_size < num_bytes:
            raise ValueError("another process's memory")
        return _mapped(own, num_bytes, mmap.PROT_READ)
    finally:
        os.close(own)


def _mapped(fd: int, num_bytes: int, protection: int) -> NDArray[np.uint8]:
    memory: Any = mmap.mmap(fd, max(num_bytes, 1), mmap.MAP_SHARED, protection)
    return np.frombuffer(memory, np.uint8, count=num_bytes)
