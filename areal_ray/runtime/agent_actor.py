"""AgentActor: runs all sibling episodes of a group, and thousands of them at once.

An episode is a coroutine that mostly waits, so one actor with one event loop holds very many;
their model calls leave through one coalescing client. Spawn it with a `max_concurrency` of at
least the groups in flight. Its state comes from the constructor alone.

run_group waits for: the agents and the rollout fleet; bounded by agent.timeout_s an attempt.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from areal_ray.agents.chat_client import ChatClient, ChatLimits
from areal_ray.agents.episode import AgentConfig, EpisodeEnd, check_agent, run_episode
from areal_ray.core.imports import resolve
from areal_ray.core.seeds import derive_seed
from areal_ray.core.summaries import Failure, GroupSummary
from areal_ray.core.task import Task
from areal_ray.core.trajectory import (
    Group,
    Outcome,
    StopReason,
    Trajectory,
    encode_group,
)
from areal_ray.engines.protocols import GenerationRequest, GenerationResult, SamplingConfig
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.template import ChatTemplate, model_context_tokens
from areal_ray.runtime.cluster import own_environment
from areal_ray.runtime.episode_dump import write_episodes
from areal_ray.runtime.fleet_sampler import FleetSampler
from areal_ray.runtime.garbage import collect_rarely
from areal_ray.runtime.replica_list import reached
from areal_ray.runtime.reply_format import reply_format
from areal_ray.runtime.rollout_client import RolloutClient

if TYPE_CHECKING:
    from areal_ray.runtime.program_episodes import ProgramEpisodes

_KEPT_SAMPLINGS = 256


@dataclass(frozen=True, slots=True)
class AgentHealth:
    """One agent actor's account of itself."""

    name: str
    incarnation: str
    """Differs after every restart."""
    num_episodes: int
    """Under way."""
    num_turns_pending: int
    """Model calls waiting for a rollout replica."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One episode, ended."""

    end: EpisodeEnd
    trajectories: tuple[Trajectory, ...]
    num_turns: int
    splits: Counter[str]


class AgentActor:
    """One replica of the agent service."""

    def __init__(
        self,
        name: str,
        *,
        model_path: str,
        config: AgentConfig,
        sampling: SamplingConfig,
        replicas: Mapping[str, Any] | str,
        context_tokens: int = 0,
        search: Sequence[str] = (),
        run_folder: str = "",
    ) -> None:
        """Load the tokenizer and the agent.

        Args:
            name: For messages.
            model_path: Checkpoint whose tokenizer and chat template render the prompts.
            config: Agent and limits.
            sampling: How every turn is sampled.
            replicas: Rollout actors by name: handles, the names they were spawned under, or the key
                of a list of such names.
            context_tokens: Prompt and sampled tokens that an engine holds at most; 0 = what the
                model allows, as the engines read it.
            search: Import roots for the agent's code.
            run_folder: Where sample episodes are written down; empty = nowhere.
        """
        self._name = name
        self._run_folder = run_folder
        self._config = config
        self._sampling_of = functools.lru_cache(_KEPT_SAMPLINGS)(
            functools.partial(_sampling_with, sampling)  # equal ones travel as one object
        )
        self._template = ChatTemplate.from_folder(model_path)
        self._reader = reply_format(self._template, config.tool_parser, config.reasoning_parser)
        self._limits = ChatLimits(
            max_new_tokens=sampling.max_new_tokens,
            context_tokens=context_tokens or model_context_tokens(model_path),
            max_turns=config.max_turns,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
            stop=sampling.stop,
        )
        # A restarted actor must not collect what its predecessor asked for.
        self._incarnation = uuid4().hex[:12]
        client_id = f"{name}-{self._incarnation}"
        self._rollouts = RolloutClient(
            reached(replicas), client_id, deadline_s=config.turn_timeout_s
        )
        self._num_episodes = 0
        self._agent: Any = None
        self._programs: ProgramEpisodes | None = None
        if config.command is None:
            self._agent = resolve(config.run, search, where="agent.run")
            check_agent(self._agent, config)
        else:
            self._programs = self._served(sampling, search)
        collect_rarely()

    def _served(self, sampling: SamplingConfig, search: Sequence[str]) -> "ProgramEpisodes":
        """What runs the episodes of an agent that is a program."""
        from areal_ray.runtime.program_episodes import ProgramEpisodes  # imports fastapi

        limits = self._limits
        return ProgramEpisodes(
            self._config,
            self._template,
            self._reader,
            sampler=FleetSampler(self._rollouts, sampling),
            limits=CallLimits(limits.max_new_tokens, limits.context_tokens, stop=limits.stop),
            search=search,
            ours=own_environment(),
        )

    async def run_group(
        self, task: Task, group_id: str, n_samples: int, seed: int
    ) -> tuple[GroupSummary, bytes]:
        """Run the sibling episodes of `task`; a failed one is attempted anew.

        Args:
            task: The same for all siblings.
            group_id: Unique in the run.
            n_samples: Sibling episodes.
            seed: Of the group; every turn of every attempt derives its own from it.

        Returns:
            The summary, and the usable siblings as `core.trajectory.encode_group` writes them.

        Raises:
            ActorLost, EngineError, DeadlineExceeded: The rollout fleet failed, not the agent.
        """
        siblings = [
            asyncio.create_task(self._sibling(task, group_id, sample, seed))
            for sample in range(n_samples)
        ]
        try:
            attempts = [attempt for made in await asyncio.gather(*siblings) for attempt in made]
        finally:
            for sibling in siblings:
                sibling.cancel()
        usable = [t for a in attempts if a.end.outcome.is_scored for t in a.trajectories]
        payload = encode_group(Group(group_id, task.id, tuple(usable)))
        summary = _summary(task.id, group_id, attempts, usable)
        return replace(summary, payload_bytes=len(payload)), payload

    async def run_groups(
        self, tasks: Sequence[Task], group_ids: Sequence[str], n_samples: int, seeds: Sequence[int]
    ) -> tuple[list[GroupSummary], list[bytes]]:
        """`run_group` for many tasks in one call: what an evaluation needs."""
        made = await asyncio.gather(
            *(
                self.run_group(task, group_id, n_samples, seed)
                for task, group_id, seed in zip(tasks, group_ids, seeds, strict=True)
            )
        )
        return [summary for summary, _ in made], [payload for _, payload in made]

    async def health(self) -> AgentHealth:
        """What it is doing now."""
        return AgentHealth(
            self._name, self._incarnation, self._num_episodes, self._rollouts.num_pending
        )

    async def use_replicas(self, replicas: Mapping[str, Any]) -> None:
        """Sample from these alone from now on; returns once nothing is under way on others."""
        await self._rollouts.use(reached(replicas))

    async def dump_episodes(self, payloads: Sequence[Any], step: int) -> None:
        """Write the episodes of groups that `step` trained on to episodes.jsonl.

        Args:
            payloads: References to encoded groups, in a list so that Ray passes them on unread.
            step: Steps done when they were trained on.
        """
        await write_episodes(payloads, self._template, Path(self._run_folder), step)

    async def close(self) -> None:
        """Abort what is under way."""
        if self._programs is not None:
            await self._programs.close()
        await self._rollouts.close()

    async def _sibling(self, task: Task, group_id: str, sample: int, seed: int) -> list[_Attempt]:
        """All attempts at one sibling; the last one is usable unless all failed."""
        attempts: list[_Attempt] = []
        for attempt in range(self._config.episode_retries + 1):
            suffix = f".{attempt}" if attempt else ""
            episode_id = f"{group_id}/{sample}{suffix}"
            attempts.append(
                await self._attempt(task, group_id, episode_id, derive_seed(seed, sample, attempt))
            )
            if attempts[-1].end.outcome.is_scored:
                break
        return attempts

    async def _attempt(self, task: Task, group_id: str, episode_id: str, seed: int) -> _Attempt:
        self._num_episodes += 1
        try:
            if self._programs is None:
                end, recorder = await self._in_process(task, (group_id, episode_id), seed)
                num_turns = recorder.num_turns
            else:
                end, recorder = await self._programs.attempt(task, group_id, episode_id, seed)
                num_turns = sum(turn.num_sampled > 0 for turn in recorder.outline())
        finally:
            self._num_episodes -= 1
        end = _as_recorded(end, recorder, num_turns)
        trajectories: list[Trajectory] = []
        if end.outcome.is_scored:
            trajectories = recorder.trajectories(
                task_id=task.id,
                group_id=group_id,
                episode_id=episode_id,
                reward=end.reward,
                outcome=end.outcome,
                failure=end.reason,
                seconds=end.seconds,
            )
        return _Attempt(end, tuple(trajectories), num_turns, recorder.splits)

    async def _in_process(
        self, task: Task, names: tuple[str, str], seed: int
    ) -> tuple[EpisodeEnd, Recorder]:
        recorder = Recorder(self._template, reader=self._reader)
        sample = functools.partial(self._sample, names, seed)
        client = ChatClient(recorder, sample, self._limits)
        return await run_episode(self._agent, task, client, self._config), recorder

    def _sample(
        self,
        names: tuple[str, str],
        seed: int,
        prompt_ids: NDArray[np.int32],
        max_new_tokens: int,
        turn_id: int,
        stop: tuple[str, ...],
    ) -> Awaitable[GenerationResult]:
        group_id, episode_id = names
        request = GenerationRequest(
            request_id=f"{episode_id}#{turn_id}",
            prompt_ids=prompt_ids,
            sampling=self._sampling_of(max_new_tokens, stop),
            seed=derive_seed(seed, turn_id),
            prefix_key=group_id,
        )
        return self._rollouts.generate(request)


def _sampling_with(
    ours: SamplingConfig, max_new_tokens: int, stop: tuple[str, ...]
) -> SamplingConfig:
    return ours.model_copy(update={"max_new_tokens": max_new_tokens, "stop": stop})


def _as_recorded(end: EpisodeEnd, recorder: Recorder, num_turns: int) -> EpisodeEnd:
    """The agent's end, with what the record knows and the agent need not."""
    if end.outcome is not Outcome.OK:
        return end
    if num_turns == 0:
        return replace(
            end, outcome=Outcome.AGENT_ERROR, reason="the agent ended without a model call"
        )
    if recorder.last_stop_reason is StopReason.LENGTH:
        reason = "the last turn reached its token limit"
        return EpisodeEnd(Outcome.TRUNCATED, reason, end.reward, end.seconds)
    return end


def _summary(
    task_id: str, group_id: str, attempts: Sequence[_Attempt], usable: Sequence[Trajectory]
) -> GroupSummary:
    failures = (
        Counter(  # of those without a turn too: a prompt that never fits is why none is there
            (str(a.end.outcome), a.end.reason)
            for a in attempts
            if not a.end.outcome.is_scored or a.num_turns == 0
        )
    )
    seconds: dict[str, float] = {}
    splits: Counter[str] = Counter()
    for attempt in attempts:
        for place, spent_s in attempt.end.seconds.items():
            seconds[place] = seconds.get(place, 0.0) + spent_s
        if attempt.splits:
            splits.update(attempt.splits)
    versions = np.zeros(0, np.int32)
    if usable:
        mask = np.concatenate([t.loss_mask for t in usable])
        versions = np.concatenate([t.versions for t in usable])[mask]
    return GroupSummary(
        group_id=group_id,
        task_id=task_id,
        num_usable=sum(a.end.outcome.is_scored for a in attempts),
        versions=tuple(np.unique(versions).tolist()),
        num_tokens=sum(len(t.token_ids) for t in usable),
        num_sampled_tokens=len(versions),
        num_turns=sum(a.num_turns for a in attempts),
        payload_bytes=0,
        outcomes=dict(Counter(str(a.end.outcome) for a in attempts)),
        failures=tuple(Failure(*key, count) for key, count in failures.items()),
        splits=dict(splits),
        seconds=seconds,
    )
