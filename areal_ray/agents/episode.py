"""One attempt at a task: the user's coroutine under its limits, and how it ended.

A bad episode is a fact, not a crash: whatever the agent raises becomes an outcome with a reason of
one line. Waits for: the agent; bounded by `timeout_s` of wall time over the whole episode.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_ray.agents.chat_client import ChatClient, LimitReachedError
from areal_ray.core.config import Config
from areal_ray.core.numeric import LARGEST_REWARD, as_number, is_reward
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Outcome
from areal_ray.errors import ArealRayError, RecipeError

Agent = Callable[..., Awaitable[float | None]]
"""async def run(task, client, **args) -> reward, or None to leave it to the reward function."""

_SINGLE_TURN = "areal_ray.agents.single_turn:answer"
_REASON_CHARACTERS = 300
_GRACE_S = 1.0
"""For a cancelled agent to end."""


ToolParser = Annotated[
    str, Field(pattern=r"^(auto|none|hermes|qwen3_coder|llama3|mistral|vllm:[a-z0-9_.-]+)$")
]
ReasoningParser = Literal["auto", "none", "think", "mistral", "seed"]


class AgentConfig(Config):
    """Which agent attempts the tasks, and within which limits."""

    run: str = _SINGLE_TURN
    """`package.module:name` of `async def run(task, client, **args) -> float | None`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    command: tuple[str, ...] | None = Field(None, min_length=1)
    """In place of run: an agent that is a program of its own, started for each episode, such as
    [python, openai_agent.py] or [node, agent.mjs]. Files are found beside the recipe."""
    env: dict[str, str | None] = Field(default_factory=dict)
    """Environment variables for it beside those that every agent gets; null = as the actors have
    it. Nothing else of their environment is handed on but PATH and the language."""
    shows_answer: bool = False
    """Put the task's answer in the JSON that it gets, too: for an agent that scores itself."""
    max_processes: int = Field(16, ge=1)
    """Programs that one AgentActor runs at once; further episodes wait for their turn."""
    max_memory_mb: int = Field(4096, ge=16)
    """Memory of one with all that it starts; one that takes more is killed."""
    max_output_bytes: int = Field(16 * 2**20, ge=0)
    """What one may write to standard output and error; one that writes more is killed."""
    max_turns: int = Field(8, ge=1)
    """Model calls of one episode; one more ends it as truncated."""
    timeout_s: float = Field(300.0, gt=0.0)
    """Wall time of one episode, tools included."""
    turn_timeout_s: float = Field(600.0, gt=0.0)
    """Longest wait for one model call, restarts of rollout replicas included; then the run ends
    and says which replica owed it."""
    replicas: int = Field(1, ge=1)
    """AgentActors; each runs very many episodes at once."""
    episode_retries: int = Field(2, ge=0)
    """Fresh attempts at a sibling episode that failed; 0 if the agent's side effects forbid it."""
    num_cpus: float = Field(0.0, ge=0.0)
    """CPU cores reserved for each AgentActor; 0 where agents mostly wait."""
    tool_parser: ToolParser = "auto"
    """How the model writes tool calls: hermes (also Qwen's), qwen3_coder, llama3, mistral,
    vllm:NAME (vLLM's parser of that name), none, or auto: by its chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """Marks around the model's reasoning, which is no part of a reply's text: think =
    <think>...</think>; auto: those that its chat template has."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.command is None:
            if self.env:
                raise ValueError("env: is given without command, which alone reads it. Remove it")
            return self
        if self.run != _SINGLE_TURN:
            raise ValueError(
                f"command: is given with run = {self.run}; an agent is one of the two. Remove one"
            )
        if self.args:
            raise ValueError("args: is given with command. Put arguments among its words")
        if not self.command[0]:
            raise ValueError("command: its first word is empty; must be a program")
        return self


class EnvError(Exception):
    """For agents to raise: the world around them failed, not the model. The reason is its text."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How one episode ended."""

    outcome: Outcome
    reason: str = ""
    """Where the outcome is not ok; one line."""
    reward: float | None = None
    """If the agent scored itself."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by place: model, tool (all the rest)."""


def check_agent(agent: Any, config: AgentConfig) -> None:
    """Refuse, before anything starts, an agent that could not be called.

    Raises:
        RecipeError: It is not an async function of (task, client), or does not take `args`.
    """
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(_call_of(agent))):
        raise RecipeError(
            f"agent.run: '{config.run}' must be an async function of (task, client), "
            f"it is a {type(agent).__name__}."
        )
    try:
        inspect.signature(agent).bind(None, None, **config.args)
    except TypeError as error:
        raise RecipeError(
            f"agent.args: '{config.run}' cannot be called with (task, client"
            f"{''.join(f', {name}=' for name in config.args)}): {error}."
        ) from error


async def run_episode(
    agent: Agent, task: Task, client: ChatClient, config: AgentConfig
) -> EpisodeEnd:
    """Run the agent to its end or its limits. Cancelling this call cancels the agent.

    An agent that does not end when it is cancelled is left behind, with a client that refuses it.
    Failures of our own (`ArealRayError`) go through; everything the agent raises becomes data.
    """
    started = time.monotonic()
    # A task of its own: who swallows the cancellation must not hold up its siblings for ever.
    attempt = asyncio.ensure_future(_attempt(agent, task, client, config))
    is_late = True
    try:
        is_late = not await _has_ended(attempt, config.timeout_s)
    finally:
        if not attempt.done():
            attempt.add_done_callback(_look_at)
            attempt.cancel()
            await asyncio.wait({attempt}, timeout=_GRACE_S)
        client.close()
    reward: float | None = None
    if is_late:
        outcome, reason = Outcome.TIMEOUT, f"episode exceeded {config.timeout_s:g} s"
    elif attempt.cancelled():  # not by us: something it awaited was cancelled
        outcome, reason = Outcome.AGENT_ERROR, "CancelledError: the agent awaited a cancelled task"
    else:
        outcome, reason, reward = attempt.result()
    if outcome is Outcome.OK and client.limit_reached:  # the agent caught it and went on
        outcome, reason = Outcome.TRUNCATED, client.limit_reached
    total = time.monotonic() - started
    spent_s = {"model": client.model_s, "tool": max(0.0, total - client.model_s)}
    seconds = {place: round(spent, 6) for place, spent in spent_s.items()}
    return EpisodeEnd(outcome, reason, reward, seconds)


async def _has_ended(attempt: "asyncio.Task[Any]", timeout_s: float) -> bool:
    """Wait for the task so long; `asyncio.wait` for one, at a fraction of its cost."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: Any = None) -> None:
        if not woken.done():
            woken.set_result(None)

    attempt.add_done_callback(wake)
    timer = loop.call_later(timeout_s, wake)
    try:
        await woken
    finally:
        timer.cancel()
        attempt.remove_done_callback(wake)
    return attempt.done()


async def _attempt(
    agent: Agent, task: Task, client: ChatClient, config: AgentConfig
) -> tuple[Outcome, str, float | None]:
    """Outcome, reason and reward."""
    try:
        return Outcome.OK, "", read_reward(await agent(task, client, **config.args))
    except LimitReachedError as reached:
        return Outcome.TRUNCATED, str(reached), None
    except EnvError as error:
        return Outcome.ENV_ERROR, one_line(str(error) or "environment failed"), None
    except ArealRayError:
        raise
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # user code: its failure is data, and must not end the loop
        return Outcome.AGENT_ERROR, one_line(f"{type(error).__name__}: {error}"), None


def _look_at(late: "asyncio.Task[Any]") -> None:
    if not late.cancelled():
        late.exception()  # nobody else asks for it, and asyncio complains of that


def one_line(text: str) -> str:
    """The text on one line, shortened for reports and counters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _REASON_CHARACTERS else flat[: _REASON_CHARACTERS - 3] + "..."


def read_reward(returned: Any) -> float | None:
    """The reward that an agent gave itself; None = it leaves that to the reward function.

    Raises:
        TypeError: It is no finite number.
    """
    if returned is None:
        return None
    number = as_number(returned)
    if number is None or not is_reward(number):
        raise TypeError(
            f"the agent returned {returned!r}; must be a finite number or None, within "
            f"+-{LARGEST_REWARD:g}"
        )
    return number


def _call_of(agent: Any) -> Any:
    return getattr(agent, "__call__", None)  # noqa: B004 (an object with an async __call__)
