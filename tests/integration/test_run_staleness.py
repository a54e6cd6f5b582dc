"""How far whole runs let rollouts run ahead of the learner, token by token."""

from collections import Counter
from typing import Any

import pytest

from areal_ray.telemetry.rows import read_rows
from tests.support.whole_runs import (
    Runs,
    assert_books_balance,
    episodes_of,
    staleness_of,
    steps_of,
    trained_tasks,
)

SLOW = "agent.run=tests.support.digits:slow_tool"


@pytest.mark.extended
def test_synchronous_runs_train_on_every_token_at_staleness_0(runs: Runs) -> None:
    summary = runs.run(
        "sync", "admission.max_head_offpolicyness=0", SLOW, "agent.args.longest_s=0.1"
    )
    folder = runs.folder / "sync"
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 6, 6)
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    episodes = episodes_of(folder)
    assert {episode["step"] for episode in episodes} >= {1, 2, 3, 4, 5}
    assert set().union(*map(staleness_of, episodes)) == {0}
    assert summary.staleness.histogram == {"0": 24}
    counts = assert_books_balance(folder)
    assert (counts["trained"], counts["dropped"], counts["failed"]) == (24, 0, 0)
    assert [len(groups) for groups in trained_tasks(folder)] == [4] * 6


@pytest.mark.parametrize(
    ("at_consumption", "bound"),
    [
        ("wait", 2),
        pytest.param("drop", 1, marks=pytest.mark.extended),
        pytest.param("mask", 1, marks=pytest.mark.extended),
    ],
)
def test_asynchronous_runs_overlap_and_never_exceed_their_bound(
    runs: Runs, at_consumption: str, bound: int
) -> None:
    summary = runs.run(
        at_consumption,
        f"admission.at_consumption={at_consumption}",
        f"admission.max_head_offpolicyness={bound}",
        SLOW,
        "steps=10",
    )
    folder = runs.folder / at_consumption
    assert (summary.outcome, summary.steps) == ("finished", 10)
    episodes = episodes_of(folder)
    if at_consumption == "mask":
        # Older tokens are there, and the learner left out just as many.
        rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]
        too_old: Counter[int] = Counter()
        for episode in episodes:
            too_old[episode["step"]] += tokens_beyond(bound, episode)
        for row in rows[:-1]:  # the last step's episodes may not be written down before the end
            assert row["learner/masked_stale_tokens"] == too_old[row["step"]]
            ages = trained_ages(bound, [e for e in episodes if e["step"] == row["step"]])
            assert row["staleness/max_versions"] == max(ages)
            assert row["staleness/mean_versions"] == pytest.approx(sum(ages) / len(ages))
        assert sum(summary.staleness.histogram.values()) <= 40
    else:
        assert max(set().union(*map(staleness_of, episodes))) <= bound
    assert summary.staleness.max <= bound
    # An episode whose tokens carry two versions was under way while the learner took a step.
    assert any(first < last for first, last in (episode["versions"] for episode in episodes))
    counts = assert_books_balance(folder)
    if at_consumption != "drop":
        assert counts["dropped"] == 0
    assert counts["trained"] == 40


def trained_ages(bound: int, episodes: list[dict[str, Any]]) -> list[int]:
    """Largest staleness of a trained token, by group; groups masked as a whole have none."""
    groups: dict[str, set[int]] = {}
    for episode in episodes:
        groups.setdefault(episode["group_id"], set()).update(staleness_of(episode))
    young = [{age for age in ages if age <= bound} for ages in groups.values()]
    return [max(ages) for ages in young if ages]


def tokens_beyond(bound: int, episode: dict[str, Any]) -> int:
    """Sampled tokens older than the bound when they were trained on."""
    consumed_at = episode["step"] - 1
    return sum(t["mask"] and consumed_at - t["version"] > bound for t in episode["tokens"])
