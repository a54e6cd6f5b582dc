"""Scoring in killable processes: what a reward does is its episode's problem alone."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_ray.core.journal import read_group_bytes
from areal_ray.core.ledger import Lease
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Group, Outcome, Trajectory, decode_group, encode_group
from areal_ray.errors import DeadlineExceeded, RecipeError
from areal_ray.rewards.reward import RewardConfig
from areal_ray.rewards.runner import Asked, RewardRunner
from areal_ray.runtime.fleet import Fleet
from areal_ray.runtime.reward_actor import RewardActor
from areal_ray.runtime.services import RewardService, Tracker
from tests.support.reward_functions import sleeper

TASK = Task("t", ({"role": "user", "content": "x"},), answer=1)
ROOT = str(Path(__file__).resolve().parents[2])
FUNCTIONS = "tests.support.reward_functions:"

LINE = Trajectory(
    token_ids=np.arange(4, dtype=np.int32),
    loss_mask=np.array([False, False, True, True]),
    behaviour_logprobs=np.array([0, 0, -1, -2], np.float32),
    versions=np.array([-1, -1, 3, 4], np.int32),
    turn_ids=np.array([-1, -1, 0, 0], np.int16),
    task_id="t",
    group_id="g",
    episode_id="e",
)


def said(*texts: str) -> list[Trajectory]:
    return [replace(LINE, episode_id=f"e{i}", final_text=text) for i, text in enumerate(texts)]


def config(function: str, **fields: Any) -> RewardConfig:
    return RewardConfig(score=FUNCTIONS + function, **{"timeout_s": 20.0, **fields})


def score(reward: RewardConfig, *groups: list[Trajectory]) -> list[Any]:
    """Verdicts of the groups one after the other."""

    async def run() -> list[Any]:
        runner = RewardRunner(reward, [ROOT])
        try:
            return [v for group in groups for v in await runner.score(TASK, group)]
        finally:
            await runner.close()
            assert not living_descendants()

    return asyncio.run(run())


def living_descendants() -> list[str]:
    """Processes below this one, zombies included, but for what pytest itself may run."""
    mine, children = os.getpid(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        is_child = int(fields[1]) == mine and ("rewards.worker" in command or fields[0] == "Z")
        if is_child or command.split("\0")[1:-1] == sleeper()[1:]:
            children.append(command)
    return children


def test_a_reward_sees_the_trajectory_and_its_arguments_and_may_print():
    told = score(config("length", args={"scale": 2.0}), said("abc", ""))
    assert [v.reward for v in told] == [6.0, 0.0]


def test_whatever_a_reward_does_costs_its_own_episode_and_nothing_else():
    texts = ("ok", "hang", "ok", "die", "raise", "exit", "abstain", "child", "escape", "ok")
    told = score(config("as_said", timeout_s=1.0), said(*texts))
    assert [v.reward for v in told] == [1.0, None, 1.0, *[None] * 6, 1.0]
    reasons = [v.reason for v in told]
    assert reasons[1] == reasons[7] == reasons[8] == "the reward exceeded 1 s"
    assert reasons[3] == "the scoring process died (SIGKILL)"
    assert reasons[4] == "the reward raised RuntimeError: judge unreachable"
    assert reasons[5] == "the reward raised SystemExit: 3"
    assert reasons[6] == "the reward abstained"
    assert told[0].details == {"said": "ok"}


@pytest.mark.parametrize(
    ("function", "bad", "reason"),
    [
        ("as_said", "hang", "the reward exceeded 1 s"),
        ("as_said", "die", "the scoring process died (SIGKILL)"),
        ("async_as_said", "hang", "the reward exceeded 1 s"),
    ],
)
def test_groups_that_reach_a_child_together_lose_only_the_bad_episode(function, bad, reason):
    texts = (("ok", "ok"), ("ok", bad, "ok"), ("ok",))

    async def run() -> list[list[Any]]:
        runner = RewardRunner(config(function, timeout_s=1.0), [ROOT])
        try:
            while not runner.is_quick:
                await runner.score(TASK, said("ok"))
            return await runner.score_groups([Asked(TASK, said(*group)) for group in texts])
        finally:
            await runner.close()

    told = asyncio.run(run())
    good = [[text == "ok" for text in group] for group in texts]
    assert [[v.reward == 1.0 for v in group] for group in told] == good
    assert told[1][1].reason == reason


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Ray gives actors uvloop's event loop where it is installed, as it is with vLLM."""
    return pytest.importorskip(request.param).new_event_loop


def test_children_killed_between_two_calls_cost_no_episode(new_loop):
    async def run() -> list[Any]:
        runner = RewardRunner(config("length"), [ROOT])
        try:
            told = await runner.score(TASK, said("a"))
            for child in runner._alive:
                os.kill(child.running.pid, signal.SIGKILL)
                await child.running.wait()
            return told + await runner.score(TASK, said("ab", "abc"))
        finally:
            await runner.close()

    with asyncio.Runner(loop_factory=new_loop) as loop:
        assert [v.reward for v in loop.run(run())] == [1.0, 2.0, 3.0]


def test_a_child_killed_while_it_is_written_to_costs_one_episode(new_loop):
    texts = said("x" * 2**22, "ab", "abc")  # more than a pipe holds

    async def run() -> list[Any]:
        runner = RewardRunner(config("length"), [ROOT])
        try:
            await runner.start()
            (child,) = runner._alive
            os.kill(child.running.pid, signal.SIGSTOP)
            scoring = asyncio.ensure_future(runner.score(TASK, texts))
            while not child.running.stdin.transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
            os.kill(child.running.pid, signal.SIGKILL)
            return await scoring
        finally:
            await runner.close()

    with asyncio.Runner(loop_factory=new_loop) as loop:
        told = loop.run(run())
    assert [v.reward for v in told] == [None, 2.0, 3.0]
    assert told[0].reason == "the scoring process died (SIGKILL)"


def test_a_reward_that_wants_too_much_memory_is_unscored_and_the_next_one_is_fine():
    told = score(config("as_said", memory_bytes=2 * 2**30), said("memory", "ok"))
    assert told[0].reward is None
    assert "memory" in told[0].reason
    assert told[1].reward == 1.0


def test_one_hanging_reward_after_the_other_leaves_no_process_behind():
    told = score(config("as_said", timeout_s=0.05), said(*["hang"] * 6))
    assert all(v.reason == "the reward exceeded 0.05 s" for v in told)


def test_slow_rewards_are_spread_over_the_workers(tmp_path):
    told = score(config("meets_workers", workers=4), said(*[str(tmp_path)] * 32))
    assert [v.reward for v in told] == [1.0] * 32


def test_an_asynchronous_reward_is_awaited_for_all_siblings_at_once():
    told = score(config("meets_siblings", workers=1), said(*[str(i) for i in range(16)]))
    assert [v.reward for v in told] == [float(i) for i in range(16)]


def test_an_asynchronous_reward_that_hangs_costs_only_its_own_episode():
    told = score(config("async_as_said", timeout_s=0.5), said("ok", "hang", "ok"))
    assert [v.reward for v in told] == [1.0, None, 1.0]
    assert told[1].reason == "the reward exceeded 0.5 s"


def test_a_reward_that_cannot_be_imported_is_one_clear_error():
    async def run(function: str, **fields: Any) -> None:
        runner = RewardRunner(config(function, **fields), [ROOT])
        try:
            await runner.start()
        finally:
            await runner.close()

    with pytest.raises(RecipeError, match="Did you mean 'length'"):
        asyncio.run(run("lenght"))
    with pytest.raises(RecipeError, match="raised OSError: no weights here"):
        asyncio.run(run("unprepared"))
    with pytest.raises(DeadlineExceeded, match=r"reward\.start_timeout_s"):
        asyncio.run(run("length", start_timeout_s=0.001))


def run_actor(actor: RewardActor, *groups: Group) -> list[Any]:
    async def run() -> list[Any]:
        try:
            return [await actor.score_group(encode_group(group), TASK) for group in groups]
        finally:
            await actor.close()

    return asyncio.run(run())


def test_a_scored_group_has_rewards_and_outcomes_filled_in_and_lies_in_the_journal(tmp_path):
    group = Group("g", "t", tuple(said("ok", "raise", "abstain")))
    actor = RewardActor("reward-0", config("as_said"), search=[ROOT], journal=str(tmp_path))
    ((summary, payload),) = run_actor(actor, group)
    scored = decode_group(payload)
    assert [t.reward for t in scored.trajectories] == [1.0, None, None]
    assert [t.outcome for t in scored.trajectories] == [Outcome.OK, *[Outcome.UNSCORED] * 2]
    assert scored.trajectories[0].token_ids.tolist() == [0, 1, 2, 3]
    assert "reward" in scored.trajectories[0].seconds
    assert summary.rewards == (1.0, None, None)
    assert summary.num_unscored == 2
    assert {f.reason for f in summary.failures} == {
        "the reward raised RuntimeError: judge unreachable",
        "the reward abstained",
    }
    assert read_group_bytes(tmp_path, summary.place) == payload


def test_groups_of_one_call_are_scored_and_journaled_each_for_itself(tmp_path):
    texts = (("ok", "raise"), ("raise", "raise", "ok"))
    groups = [Group(g, "t", tuple(said(*t))) for g, t in zip("ab", texts, strict=True)]
    actor = RewardActor("reward-0", config("as_said"), search=[ROOT], journal=str(tmp_path))

    async def run() -> tuple[Any, ...]:
        try:
            return await actor.score_many([TASK, TASK], *map(encode_group, groups))
        finally:
            await actor.close()

    summaries, *payloads = asyncio.run(run())
    assert [s.rewards for s in summaries] == [(1.0, None), (None, None, 1.0)]
    for summary, payload, group in zip(summaries, payloads, groups, strict=True):
        assert summary.group_id == decode_group(payload).group_id == group.group_id
        assert read_group_bytes(tmp_path, summary.place) == payload


def test_scoring_twice_gives_the_same_answer():
    group = Group("g", "t", tuple(said("ok", "raise")))
    first, second = run_actor(RewardActor("r", config("as_said"), search=[ROOT]), group, group)
    assert first[0].rewards == second[0].rewards == (1.0, None)
    assert first[0].place is None


def test_an_episode_that_scored_itself_is_left_alone():
    lines = (replace(said("ok")[0], reward=0.25), replace(said("raise")[0], reward=0.5))
    group = Group("g", "t", (lines[0], replace(lines[1], episode_id="other")))
    ((summary, _),) = run_actor(RewardActor("r", config("as_said"), search=[ROOT]), group)
    assert summary.rewards == (0.25, 0.5)


def test_the_branches_of_an_episode_share_the_verdict_on_its_last_turn():
    early = replace(said("raise")[0], branch_id=0)
    late = replace(said("ok")[0], branch_id=1, turn_ids=np.array([-1, -1, 1, 1], np.int16))
    ((summary, payload),) = run_actor(
        RewardActor("r", config("as_said"), search=[ROOT]), Group("g", "t", (late, early))
    )
    assert summary.rewards == (1.0,)
    assert [t.reward for t in decode_group(payload).trajectories] == [1.0, 1.0]


def test_scoring_works_from_inside_a_ray_actor_and_after_it_was_killed(ray_session):
    import ray

    actor = (
        ray.remote(RewardActor)
        .options(num_cpus=0, max_restarts=-1, max_task_retries=2)
        .remote("reward-0", config("as_said"), search=[ROOT])
    )
    payload = encode_group(Group("g", "t", tuple(said("ok", "hang", "ok"))))
    try:
        method = actor.score_group.options(num_returns=2)
        pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
        ray.get(actor.ready.remote())
        os.kill(pid, 9)
        quick = encode_group(Group("g", "t", tuple(said("ok", "raise"))))
        summary, scored = method.remote(quick, TASK)
        assert ray.get(summary, timeout=60).rewards == (1.0, None)
        assert [t.reward for t in decode_group(ray.get(scored)).trajectories] == [1.0, None]
        assert payload
    finally:
        ray.kill(actor)
    deadline = time.monotonic() + 20
    while living := living_descendants():
        assert time.monotonic() < deadline, living
        time.sleep(0.2)


def test_quick_groups_share_a_call_and_a_killed_actor_costs_none_of_them(ray_session):
    import ray

    made = ray.remote(RewardActor).options(num_cpus=0, max_restarts=-1)
    actor = made.remote("reward-0", config("as_said"), search=[ROOT])
    leases = [Lease(0, replace(TASK, id=f"t{i}"), 0, 0) for i in range(5)]

    async def score_all(rewards: RewardService) -> list[Any]:
        group = encode_group(Group("g", "t", tuple(said("ok", "raise"))))
        calls = [rewards.score_group(lease, ray.put(group)) for lease in leases]
        return [summary for summary, _ in await asyncio.gather(*calls)]

    async def run() -> tuple[list[Any], list[Any]]:
        rewards = RewardService(Fleet("reward", {"reward-0": actor}), Tracker())
        end = time.monotonic() + 60  # it must have been quick of late, which it is not under load
        together = await score_all(rewards)
        while len({s.seconds for s in together}) > 1 and time.monotonic() < end:  # of the call
            together = await score_all(rewards)
        calls = asyncio.ensure_future(score_all(rewards))
        await asyncio.sleep(0)
        ray.kill(actor, no_restart=False)
        return together, await calls

    try:
        together, after = asyncio.run(run())
    finally:
        ray.kill(actor)
    assert len({summary.seconds for summary in together}) == 1
    assert [summary.rewards for summary in together + after] == [(1.0, None)] * 10
