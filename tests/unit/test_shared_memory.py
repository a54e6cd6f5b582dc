"""Weights read out of another process's memory: what arrives, and what ends a wait."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_ray.runtime.shared_memory import Board, BoardReader, SharedBuffer

ROOT = Path(__file__).resolve().parents[2]

LEARNER = """
import sys
import numpy as np
from areal_ray.runtime.shared_memory import Board, SharedBuffer
board, buffers = Board(), [SharedBuffer(96), SharedBuffer(96)]
print(board.offer, flush=True)
for line in sys.stdin:
    verb, *numbers = line.split()
    if verb == "begin":
        board.begin(int(numbers[0]), buffers[int(numbers[0]) % 2])
    elif verb == "write":
        version, bucket = map(int, numbers)
        buffers[version % 2].array[32 * bucket : 32 * bucket + 32] = version + bucket
        board.advance(bucket + 1)
    elif verb == "give_up":
        board.give_up()
    print("done", flush=True)
"""


class Learner:
    """Another process that does what it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LEARNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.offer = self._line()

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        assert self._line() == "done"

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def learner() -> Iterator[Learner]:
    started = Learner()
    yield started
    started.end()


def _opened(learner: Learner) -> BoardReader:
    reader = BoardReader.of(learner.offer)
    assert reader is not None
    return reader


def test_buckets_of_successive_versions_are_read_as_they_become_whole(learner: Learner) -> None:
    reader = _opened(learner)
    for version in (1, 2, 3):
        learner.tell("begin", version)
        memory = reader.wait_begin(version, 10.0)
        for bucket in range(3):
            with pytest.raises(TimeoutError, match=r"timed out after 0\.01 s"):
                reader.wait_bucket(bucket, 0.01)
            learner.tell("write", version, bucket)
            reader.wait_bucket(bucket, 10.0)
            assert set(memory[32 * bucket : 32 * bucket + 32].tolist()) == {version + bucket}
    reader.close()


def test_memory_can_be_read_but_not_written(learner: Learner) -> None:
    reader = _opened(learner)
    learner.tell("begin", 1)
    memory = reader.wait_begin(1, 10.0)
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1


def test_what_was_read_stays_when_the_learner_ends_and_waiting_ends_at_once(
    learner: Learner,
) -> None:
    reader = _opened(learner)
    learner.tell("begin", 5)
    learner.tell("write", 5, 0)
    memory = reader.wait_begin(5, 10.0)
    timer = threading.Timer(0.1, learner.end)
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(ConnectionError, match="process ended"):
        reader.wait_bucket(1, 60.0)
    assert time.monotonic() - started_s < 20.0
    timer.join()
    reader.wait_bucket(0, 1.0)
    assert set(memory[:32].tolist()) == {5}


def test_a_learner_that_gives_up_ends_the_wait(learner: Learner) -> None:
    reader = _opened(learner)
    learner.tell("begin", 1)
    reader.wait_begin(1, 10.0)
    learner.tell("give_up")
    with pytest.raises(ConnectionError, match="gave up"):
        reader.wait_bucket(0, 60.0)


def test_another_version_than_the_one_awaited_is_refused(learner: Learner) -> None:
    reader = _opened(learner)
    learner.tell("begin", 4)
    with pytest.raises(ConnectionError, match="sends version 4, not 5"):
        reader.wait_begin(5, 10.0)


def test_the_wait_for_a_learner_that_never_begins_ends(learner: Learner) -> None:
    with pytest.raises(TimeoutError, match=r"timed out after 0\.05 s"):
        _opened(learner).wait_begin(1, 0.05)


def test_memory_that_is_not_the_one_offered_is_not_read(learner: Learner) -> None:
    pid, fd, token = learner.offer.split()
    assert BoardReader.of(f"{pid} {fd} {'00' * (len(token) // 2)}") is None
    assert BoardReader.of(f"{pid} 999999 {token}") is None
    assert BoardReader.of("") is None
    learner.end()
    assert BoardReader.of(learner.offer) is None


def test_a_buffer_that_takes_the_place_of_another_is_not_mistaken_for_it() -> None:
    board = Board()
    reader = BoardReader.of(board.offer)
    assert reader is not None
    first = SharedBuffer(32)
    board.begin(1, first)
    assert not reader.wait_begin(1, 1.0).any()
    number = first.fd
    del first
    second = SharedBuffer(64)
    second.array[:] = 7
    assert second.fd == number  # the system gives the lowest free number
    board.begin(2, second)
    assert np.array_equal(reader.wait_begin(2, 1.0), second.array)
