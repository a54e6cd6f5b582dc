"""Each wait has a name, and its seconds are counted once."""

from areal_ray.telemetry.waits import WaitBoard


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_board_tells_who_waits_for_what_the_longest_first():
    clock = Clock()
    board = WaitBoard(clock)
    owed = ["3 of 16 groups"]
    with board.waiting("learner", lambda: owed[0]):
        clock.now = 5.0
        with board.waiting("admission", "headroom"):
            clock.now = 7.0
            owed[0] = "2 of 16 groups"
            waits = [str(wait) for wait in board.waits()]
            assert waits == [
                "learner waits for 2 of 16 groups (7 s)",
                "admission waits for headroom (2 s)",
            ]
            assert board.by_role() == {"learner": "2 of 16 groups", "admission": "headroom"}
    assert board.waits() == []


def test_a_wait_that_spans_two_steps_counts_in_both_and_once_in_all():
    clock = Clock()
    board = WaitBoard(clock)
    with board.waiting("learner", "groups", metric="time/learner_wait_s"):
        clock.now = 2.0
        assert board.take_seconds() == {"time/learner_wait_s": 2.0}
        clock.now = 5.0
    assert board.take_seconds() == {"time/learner_wait_s": 3.0}
    assert board.take_seconds() == {}


def test_a_wait_ends_when_its_block_raises():
    board = WaitBoard(Clock())
    try:
        with board.waiting("learner", "groups"):
            raise RuntimeError("cancelled")
    except RuntimeError:
        pass
    assert board.waits() == []
