"""An exception of any class in a loop of the driver ends the whole run, and is what is told."""

import json
from typing import Any

import pytest

from tests.support.whole_runs import PATIENCE_S, Runs, actor_names, until

EVALUATION = "evaluation={tasks: {source: 'tests.support.digits:tasks', limit: 4}}"


class Odd(BaseException):
    """Neither an Exception nor made from one text."""

    def __init__(self, code: int, *, where: str) -> None:
        self.code, self.where = code, where

    def __str__(self) -> str:
        return f"odd {self.code} in {self.where}"


class Faulty:
    """A display of the user's that raises in one of its methods, in the loop that calls it."""

    def __init__(self, method: str) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        def show(*args: Any, **fields: Any) -> None:
            if name == self._method:
                raise Odd(7, where=name)

        return show


@pytest.mark.parametrize(
    "method",
    [
        "on_step",
        pytest.param("on_status", marks=pytest.mark.extended),
        pytest.param("on_eval", marks=pytest.mark.extended),
    ],
)
def test_it_ends_the_run_with_that_exception(runs: Runs, method: str) -> None:
    name = f"odd-{method}"
    held_out = (EVALUATION,) if method == "on_eval" else ()
    handle = runs.start(name, *held_out, "steps=10000", progress=Faulty(method))
    with pytest.raises(Odd, match=f"odd 7 in {method}"):
        handle.wait(PATIENCE_S)
    summary = json.loads((runs.folder / name / "summary.json").read_text(encoding="utf-8"))
    assert summary["outcome"] == "failed"
    assert summary["failure"] == f"Odd: odd 7 in {method}"
    until(lambda: not actor_names(name), "its actors to end", 30)


@pytest.mark.extended
def test_a_reward_that_raises_such_a_class_is_named_when_it_stops_the_run(runs: Runs) -> None:
    error = runs.failure("odd-reward", "reward.score=tests.support.digits:raises_oddly")
    assert "OddVerdict" in str(error)
    assert "sample 5" in str(error)
