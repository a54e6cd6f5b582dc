"""An agent's attempt at a task: its limits, and how it ends."""

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_ray.agents import EnvError, Task, chat_client, episode
from areal_ray.agents.chat_client import ChatClient, ChatLimits, LimitReachedError
from areal_ray.agents.episode import AgentConfig, EpisodeEnd, check_agent, run_episode
from areal_ray.core.trajectory import Outcome, StopReason
from areal_ray.errors import EngineError, RecipeError
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.template import ChatTemplate
from areal_ray.rewards.reward import read_returned
from tests.support.templates import TPL_A, ScriptedTurn, letter_tokenizer

TASK = Task("t", ({"role": "user", "content": "hi"},))
LIMITS = ChatLimits(max_new_tokens=8, context_tokens=200, max_turns=3)


class World:
    """A client whose model answers from a script, and what was asked of it."""

    def __init__(self, limits: ChatLimits = LIMITS, replies: tuple[str, ...] = ("yo",)) -> None:
        self.template = ChatTemplate(letter_tokenizer(), TPL_A)
        self.recorder = Recorder(self.template)
        self.client = ChatClient(self.recorder, self.sample, limits)
        self.replies = replies
        self.asked: list[int] = []
        self.stops: list[tuple[str, ...]] = []
        self.delay_s = 0.0
        self.stop_reason = StopReason.STOP

    async def sample(
        self, prompt_ids: Any, max_new_tokens: int, turn_id: int, stop: tuple[str, ...]
    ) -> ScriptedTurn:
        self.asked.append(max_new_tokens)
        self.stops.append(stop)
        await asyncio.sleep(self.delay_s)
        text = self.replies[turn_id % len(self.replies)]
        return ScriptedTurn(self.template.encode(text), stop_reason=self.stop_reason)

    def run(self, agent: Callable[..., Awaitable[Any]], **config: Any) -> EpisodeEnd:
        return asyncio.run(run_episode(agent, TASK, self.client, AgentConfig(**config)))

    def create(self, **options: Any) -> Any:
        return asyncio.run(self.client.chat.completions.create(messages=TASK.messages, **options))


async def one_turn(task: Task, client: ChatClient) -> float | None:
    await client.chat.completions.create(messages=list(task.messages))
    return None


def test_a_reply_reads_like_openais_and_may_be_sent_back_as_it_is():
    world = World(replies=("yo", "bye"))

    async def agent(task: Task, client: ChatClient) -> None:
        messages: list[Any] = list(task.messages)
        first = await client.chat.completions.create(messages=messages, max_tokens=5)
        assert first.choices[0].finish_reason == "stop"
        assert first.usage.total_tokens == first.usage.prompt_tokens + 2
        message = first.choices[0].message
        assert (message.role, message.content) == ("assistant", "yo")
        messages += [message, {"role": "user", "content": "more"}]
        await client.chat.completions.create(messages=messages)

    assert world.run(agent).outcome is Outcome.OK
    (line,) = world.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
    assert line.final_text == "bye"
    assert line.num_sampled_tokens == 5


class Odd(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit(3), GeneratorExit, Odd("x")])
def test_whatever_an_agent_raises_ends_its_episode_and_not_the_actors_loop(raised):
    async def agent(task: Task, client: ChatClient) -> None:
        raise raised

    end = World().run(agent)
    assert end.outcome is Outcome.AGENT_ERROR
    assert end.reason.startswith((raised if isinstance(raised, type) else type(raised)).__name__)


def test_an_agents_own_reward_is_kept_and_none_leaves_it_to_the_reward_function():
    async def sure(task: Task, client: ChatClient) -> float:
        return 1

    assert World().run(sure).reward == 1.0
    assert World().run(one_turn).reward is None


@pytest.mark.parametrize("returned", ["1", float("nan"), 1e200, [1]])
def test_a_return_value_that_is_no_reward_is_the_agents_error(returned):
    async def agent(task: Task, client: ChatClient) -> Any:
        return returned

    end = World().run(agent)
    assert end.outcome is Outcome.AGENT_ERROR
    assert "must be a finite number or None" in end.reason


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ValueError("bad\n thing"), Outcome.AGENT_ERROR, "ValueError: bad thing"),
        (SystemExit(3), Outcome.AGENT_ERROR, "SystemExit: 3"),
        (TimeoutError("its own"), Outcome.AGENT_ERROR, "TimeoutError: its own"),
        (EnvError("sandbox gone"), Outcome.ENV_ERROR, "sandbox gone"),
    ],
)
def test_what_an_agent_raises_becomes_an_outcome_with_a_one_line_reason(error, outcome, reason):
    async def agent(task: Task, client: ChatClient) -> None:
        raise error

    end = World().run(agent)
    assert (end.outcome, end.reason) == (outcome, reason)


def test_a_failure_of_the_engine_is_not_the_agents_and_goes_through():
    async def agent(task: Task, client: ChatClient) -> None:
        raise EngineError("rollout-0: out of memory")

    with pytest.raises(EngineError):
        World().run(agent)


def test_an_agent_that_never_ends_is_cancelled_at_the_wall_clock_limit():
    seen: list[str] = []

    async def agent(task: Task, client: ChatClient) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    end = World().run(agent, timeout_s=0.05)
    assert end.outcome is Outcome.TIMEOUT
    assert end.reason == "episode exceeded 0.05 s"
    assert seen == ["cancelled"]


def test_turns_that_trickle_do_not_start_the_limit_anew():
    world = World(ChatLimits(max_new_tokens=8, context_tokens=10_000, max_turns=1000))
    world.delay_s = 0.02

    async def agent(task: Task, client: ChatClient) -> None:
        while True:
            await client.chat.completions.create(messages=list(task.messages))

    assert world.run(agent, timeout_s=0.1).outcome is Outcome.TIMEOUT


def test_one_turn_too_many_truncates_even_if_the_agent_swallows_it():
    async def greedy(task: Task, client: ChatClient) -> None:
        for _ in range(9):
            await client.chat.completions.create(messages=list(task.messages))

    async def swallowing(task: Task, client: ChatClient) -> None:
        try:
            await greedy(task, client)
        except Exception:
            return

    for agent in (greedy, swallowing):
        world = World()
        end = world.run(agent)
        assert (end.outcome, end.reason) == (Outcome.TRUNCATED, "agent.max_turns = 3")
        assert len(world.asked) == 3


def test_a_prompt_beyond_the_context_window_truncates_and_is_never_sent():
    world = World(ChatLimits(max_new_tokens=8, context_tokens=10, max_turns=3))
    end = world.run(one_turn)
    assert end.outcome is Outcome.TRUNCATED
    assert "context window 10" in end.reason
    assert not world.asked


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 6, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 500}, 8),
    ],
)
def test_token_limits_are_honoured_up_to_the_recipes(options, expected):
    world = World()
    world.create(**options)
    assert world.asked == [expected]


def test_a_turn_is_shortened_to_what_is_left_of_the_context_window():
    prompt = len("[user]hi[/]\n[assistant]")
    world = World(ChatLimits(max_new_tokens=8, context_tokens=prompt + 3, max_turns=3))
    world.create()
    assert world.asked == [3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tokens": 0}, "max_tokens = 0; must be >= 1"),
        ({"max_completion_tokens": -1}, "must be >= 1"),
        ({"temperature": 0.2}, "temperature = 0.2: the run samples with 1.0"),
        ({"stop": ["x", ""]}, "stop = .* must be a text or a list of texts, none empty"),
        ({"stream": True}, "stream"),
        ({"n": 4}, "n = 4"),
        ({"frequency_penalty": 1.0}, "frequency_penalty = 1.0: the run samples with 0.0"),
        ({"logit_bias": {"5": -100}}, "logit_bias = .*: the run samples with {}"),
        ({"logprobs": True}, "logprobs: this client does not support it"),
    ],
)
def test_an_option_that_would_change_sampling_unseen_is_refused_by_name(options, told):
    with pytest.raises(ValueError, match=told):
        World().create(**options)


def test_stop_strings_of_the_agent_come_beside_the_runs_and_end_what_is_shown():
    limits = ChatLimits(max_new_tokens=8, context_tokens=200, max_turns=3, stop=("#",))
    world = World(limits, replies=("yo;no",))
    plain, one, several = world.create(), world.create(stop=";"), world.create(stop=["n", "#", ";"])
    assert world.stops == [("#",), ("#", ";"), ("#", "n", ";")]
    assert [r.choices[0].message.content for r in (plain, one, several)] == ["yo;no", "yo", "yo"]
    assert one.choices[0].finish_reason == "stop"
    assert one.usage.completion_tokens == 5


def test_options_that_say_what_the_run_does_anyway_are_accepted():
    World().create(model="x", temperature=1.0, top_p=1.0, n=1, stream=False, seed=None)
    World().create(presence_penalty=0, frequency_penalty=0.0, logit_bias={})
    World(replace(LIMITS, presence_penalty=0.5)).create(presence_penalty=0.5)


def test_seconds_tell_the_model_from_everything_else():
    world = World()
    world.delay_s = 0.05

    async def agent(task: Task, client: ChatClient) -> None:
        await one_turn(task, client)
        await asyncio.sleep(0.1)

    seconds = world.run(agent).seconds
    assert seconds["model"] >= 0.05
    assert seconds["tool"] >= 0.1


def test_an_agent_that_could_not_be_called_is_refused_before_anything_starts():
    def not_async(task: Task, client: ChatClient) -> None: ...

    async def no_client(task: Task) -> None: ...

    config = AgentConfig(run="m:f")
    with pytest.raises(RecipeError, match="must be an async function"):
        check_agent(not_async, config)
    with pytest.raises(RecipeError, match="cannot be called with"):
        check_agent(no_client, config)
    with pytest.raises(RecipeError, match="'nope'"):
        check_agent(one_turn, AgentConfig(run="m:f", args={"nope": 1}))
    check_agent(one_turn, config)


def test_an_agent_that_awaits_a_cancelled_task_fails_alone():
    async def agent(task: Task, client: ChatClient) -> None:
        mine = asyncio.ensure_future(asyncio.sleep(9))
        mine.cancel()
        await mine

    end = World().run(agent)
    assert end.outcome is Outcome.AGENT_ERROR
    assert "cancelled" in end.reason


def test_an_agent_that_swallows_its_cancellation_is_left_behind_and_samples_no_more(monkeypatch):
    monkeypatch.setattr(episode, "_GRACE_S", 0.05)
    monkeypatch.setattr(chat_client, "_REFUSAL_S", 0.01)
    world, told = World(), []

    async def agent(task: Task, client: ChatClient) -> None:
        for _ in range(4):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        try:
            await one_turn(task, client)
        except LimitReachedError as refused:
            told.append(str(refused))

    async def run() -> EpisodeEnd:
        ended = await run_episode(agent, TASK, world.client, AgentConfig(timeout_s=0.05))
        assert ended.seconds["tool"] < 0.3
        await asyncio.sleep(0.5)
        return ended

    assert asyncio.run(run()).outcome is Outcome.TIMEOUT
    assert (told, world.asked) == (["the episode is over"], [])


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.bool_(True), np.array(1.0)])
def test_a_scalar_of_any_library_is_a_reward(reward):
    async def agent(task: Task, client: ChatClient) -> Any:
        return reward

    assert World().run(agent).reward == 1.0
    assert read_returned(reward).reward == 1.0


@pytest.mark.parametrize("reward", [10**400, float("nan"), "1", [1.0], np.array([1.0])])
def test_what_is_no_finite_number_is_no_reward(reward):
    async def agent(task: Task, client: ChatClient) -> Any:
        return reward

    assert World().run(agent).outcome is Outcome.AGENT_ERROR
    assert read_returned(reward).reward is None


def test_thousands_of_episodes_wait_side_by_side_for_little_memory_and_no_work():
    world, count = World(), 4_000

    async def run() -> tuple[float, int]:
        over = asyncio.Event()

        async def agent(task: Task, client: ChatClient) -> None:
            await over.wait()

        config = AgentConfig()
        tracemalloc.start()
        waiting = [
            asyncio.ensure_future(
                run_episode(
                    agent,
                    TASK,
                    ChatClient(Recorder(world.template), world.sample, LIMITS),
                    config,
                )
            )
            for _ in range(count)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        before = time.process_time()
        await asyncio.sleep(0.3)
        spent = time.process_time() - before
        over.set()
        ends = await asyncio.gather(*waiting)
        assert {end.outcome for end in ends} == {Outcome.OK}
        return spent, held // count

    spent, held_bytes = asyncio.run(run())
    assert held_bytes < 30_000
    assert spent < 0.1  # of the processor's time
