"""A run on given rows that is resumed goes on as it would have without the break."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_ray.driver import fit, prefer
from areal_ray.ending import root_cause
from areal_ray.engines.preference import PreferenceConfig
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.sft import SftEvaluation, SftPhase, SftUntil
from areal_ray.errors import ActorLost, DataError
from areal_ray.records import Records
from areal_ray.run import PairRun, RowCursor, SftRun
from areal_ray.runtime.head_watch import HeadNews
from areal_ray.runtime.run_config import DeadlinesConfig
from areal_ray.telemetry.progress import QuietProgress
from areal_ray.telemetry.sinks import TelemetryConfig, open_metric_log
from areal_ray.telemetry.tally import RunTally
from areal_ray.telemetry.waits import WaitBoard

UNTIL = SftUntil(exact_match=0.5, every_steps=5)
GATED = SftPhase(source="m:f", steps=10, batch_size=4, until=UNTIL, max_steps=30)
PHASES = (GATED, SftPhase(source="m:f", steps=6, batch_size=8))


@dataclass
class Actors:
    """Answers for the learner actors; what they save is the run's own state."""

    reached_at: int = 15
    """Steps after which held-out examples are reproduced."""
    taken: list[tuple[Any, ...]] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def sft_step(self, phase: int, first: int) -> StepStats:
        self.taken.append((phase, first))
        return StepStats()

    async def sft_evaluate(self, phase: int) -> SftEvaluation:
        return SftEvaluation(8, 1.0, 0.5, float(len(self.taken) >= self.reached_at), ())

    async def pair_step(self, first: int) -> StepStats:
        self.taken.append((first,))
        return StepStats()

    async def save_if_due(self, run: Any) -> None:
        self.states[run.step] = run.state_dict()


@dataclass
class Head:
    """Answers for the watch on Ray's head."""

    news: HeadNews = field(default_factory=HeadNews)

    async def look(self) -> HeadNews:
        return self.news


def common(folder: Path, actors: Actors, told: Any = len) -> dict[str, Any]:
    config = TelemetryConfig(console="off", tensorboard=False, ray_metrics=False)
    waits = WaitBoard()
    records = Records(
        log=open_metric_log(folder, config),
        progress=QuietProgress(),
        waits=waits,
        admission=None,
        tally=RunTally(),
        write_status=told,
    )
    return {
        "deadlines": DeadlinesConfig(),
        "head": Head(),
        "learners": actors,
        "checkpoints": actors,
        "records": records,
        "waits": waits,
    }


def sft_run(folder: Path, actors: Actors, phases: tuple[SftPhase, ...] = PHASES) -> SftRun:
    return SftRun(steps=99, rows=RowCursor(3), phases=phases, **common(folder, actors))


def resumed(run: Any, state: dict[str, Any]) -> Any:
    run.step = state["step"]
    run.load_state_dict(state)
    return run


@pytest.mark.parametrize("at", [4, 10, 12, 15, 16, 20])
def test_phases_take_the_rows_that_they_would_have_taken_wherever_the_break_was(tmp_path, at):
    straight = Actors()
    asyncio.run(fit(sft_run(tmp_path / "a", straight)))
    assert straight.taken[13:17] == [(0, 52), (0, 56), (1, 0), (1, 8)]
    again = Actors(taken=straight.taken[:at])
    asyncio.run(fit(resumed(sft_run(tmp_path / "b", again), straight.states[at])))
    assert again.taken == straight.taken


def test_a_slow_step_says_what_it_is_and_how_far_the_run_is(tmp_path):
    actors, told = Actors(), []
    run = SftRun(
        steps=99, rows=RowCursor(3), phases=PHASES, watch_every_s=0.01,
        **common(tmp_path, actors, told.append),
    )  # fmt: skip

    async def slow(phase: int, first: int) -> StepStats:
        await asyncio.sleep(0.2)
        raise DataError("a row is bad")

    actors.sft_step = slow
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(fit(run))
    assert str(root_cause(ended.value)) == "a row is bad"
    assert told[-1]["waits"] == {"driver": "step 1 of the learner"}
    assert told[-1]["services"] == {"training": {"learner": "step 0 of 99"}}
    assert len(told) > 1


def test_a_head_that_is_gone_ends_a_step_that_would_never_return(tmp_path):
    actors = Actors()

    async def never(phase: int, first: int) -> StepStats:
        await asyncio.Event().wait()
        return StepStats()

    actors.sft_step = never
    run = sft_run(tmp_path, actors)
    run.head = Head(HeadNews(gone="Ray's head has not answered"))
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(fit(run))
    assert isinstance(root_cause(ended.value), ActorLost)


def test_another_batch_goes_on_at_the_row_where_the_last_one_ended(tmp_path):
    before, after = Actors(), Actors()
    asyncio.run(fit(sft_run(tmp_path / "a", before, PHASES[1:])))
    larger = (PHASES[1].model_copy(update={"batch_size": 10}),)
    asyncio.run(fit(resumed(sft_run(tmp_path / "b", after, larger), before.states[2])))
    assert after.taken == [(0, 16), (0, 26), (0, 36), (0, 46)]


def test_pairs_go_on_where_they_were(tmp_path):
    config = PreferenceConfig(source="m:f", steps=5, batch_size=3)
    before, after = Actors(), Actors()
    run = PairRun(steps=5, rows=RowCursor(3), config=config, **common(tmp_path / "a", before))
    asyncio.run(prefer(run))
    halved = config.model_copy(update={"batch_size": 6})
    later = PairRun(steps=5, rows=RowCursor(3), config=halved, **common(tmp_path / "b", after))
    asyncio.run(prefer(resumed(later, before.states[3])))
    assert (before.taken[3:], after.taken) == ([(9,), (12,)], [(9,), (15,)])
