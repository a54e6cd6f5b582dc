"""The small facts about a group that travel to the driver beside its payload reference."""

from dataclasses import dataclass, field

from areal_ray.core.journal import JournalPlace


@dataclass(frozen=True, slots=True)
class Failure:
    """Episodes that ended without a usable result for the same reason."""

    outcome: str
    """A value of `core.trajectory.Outcome`."""
    reason: str
    """One line."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What an agent actor says of a finished group, rewards excepted."""

    group_id: str
    task_id: str
    num_usable: int
    """Sibling episodes that may be scored; the others failed for good."""
    versions: tuple[int, ...]
    """Of the sampled tokens, each once, the oldest first."""
    num_tokens: int
    """All tokens of all trajectories, shared prompts counted each time."""
    num_sampled_tokens: int
    num_turns: int
    """Model calls of all siblings."""
    payload_bytes: int
    outcomes: dict[str, int] = field(default_factory=dict)
    """Episodes by outcome, each attempt counted."""
    failures: tuple[Failure, ...] = ()
    """Why attempts failed, those that a retry made good included."""
    splits: dict[str, int] = field(default_factory=dict)
    """Times a conversation stopped extending its record, by reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time summed over episodes, by place: model, tool."""
    sessions: tuple[str, ...] = ()
    """Ids of the gateway's sessions that are its episodes; in kind online alone."""
    session_group: str = ""
    """The gateway's own name of them together."""

    @property
    def oldest_version(self) -> int:
        """-1 if nothing was sampled."""
        return self.versions[0] if self.versions else -1

    @property
    def newest_version(self) -> int:
        """-1 if nothing was sampled."""
        return self.versions[-1] if self.versions else -1


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """What a reward actor says of a scored group."""

    group_id: str
    rewards: tuple[float | None, ...]
    """One an episode, in the order of the payload; None = could not be scored."""
    num_unscored: int
    failures: tuple[Failure, ...] = ()
    """Why episodes could not be scored."""
    truncated: frozenset[int] = frozenset()
    """Places in `rewards` of episodes that a limit cut short."""
    metrics: tuple[tuple[str, float, float], ...] = ()
    """(name, value, weight) that the group adds to the row of the step that trains on it."""
    place: JournalPlace | None = None
    """Where the scored payload lies in the run's journal, if it was written there."""
    payload_bytes: int = 0
    seconds: float = 0.0
    """Wall time of scoring the group: its share of that of the call it came in."""
    slowest_s: float = 0.0
    """Longest scoring of one episode."""
    needs_rewards: bool = True
    """False where nobody scores: an episode that ended well is usable as it is."""

    def scored_rewards(self, *, with_truncated: bool = True) -> tuple[float, ...]:
        """The rewards that mean something, those of episodes that a limit cut short or not."""
        return tuple(
            reward
            for place, reward in enumerate(self.rewards)
            if reward is not None and (with_truncated or place not in self.truncated)
        )


def unscored(made: GroupSummary) -> ScoreSummary:
    """The summary of a group that nobody scores, as in a run of kind distill."""
    count = made.num_usable
    sampled, weight = made.num_sampled_tokens, float(count)
    metrics = [
        ("rollout/sampled_tokens", float(sampled), 1.0),
        ("rollout/prompt_tokens", float(made.num_tokens - sampled), 1.0),
        ("agent/episodes", weight, 1.0),
        ("agent/ok_episodes", float(made.outcomes.get("ok", 0)), 1.0),
        ("agent/truncated_episodes", float(made.outcomes.get("truncated", 0)), 1.0),
    ]
    if count:
        metrics += [
            ("agent/turns", made.num_turns / count, weight),
            ("agent/episode_tokens", made.num_tokens / count, weight),
            ("agent/sampled_tokens", sampled / count, weight),
        ]
    return ScoreSummary(
        group_id=made.group_id,
        rewards=(None,) * count,
        num_unscored=0,
        metrics=tuple(metrics),
        needs_rewards=False,
    )
