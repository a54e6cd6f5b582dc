"""The gateway's sessions: who may call into which record, and what training gets of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_ray.core.config import Config
from areal_ray.core.trajectory import Trajectory
from areal_ray.gateway.call import CallHints
from areal_ray.gateway.door import SessionRecord
from areal_ray.gateway.recorder import Recorder


class SessionsConfig(Config):
    """How long sessions last."""

    session_timeout_s: float = 3600.0
    """Longest life of a session. Then, as with the next one, it counts with the reward that it
    has; without one it is rejected, with the time-out as reason."""
    idle_timeout_s: float = 900.0
    """Longest silence of a session between two calls."""
    feedback_timeout_s: float = 600.0
    """How long a session that ended without a reward waits for one. Then it is unscored, which is
    no reward of 0. Set 0 where the recipe has a reward function for those."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """Sessions that were opened together and are over; those rejected are left out."""

    group_key: str
    """Unique for ever."""
    task_id: str
    session_ids: tuple[str, ...]
    trajectories: tuple[Trajectory, ...]
    """`group_id` = `group_key`, `episode_id` = the session. Outcome ok with the session's reward
    (rewards of turns add up to it, and stand in `details["turn_rewards"]` by turn), or unscored."""
    num_turns: int
    splits: Mapping[str, int] = field(default_factory=dict)
    """Conversations that stopped extending their record, by reason."""


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What a gateway holds now, and what has ended here."""

    num_slots: int
    """Groups that training waits for."""
    num_open: int
    """Sessions that may be called."""
    num_waiting: int
    """Sessions that ended and wait for a reward or for their siblings."""
    num_ready: int
    """Groups that nobody holds."""
    num_held: int
    """Groups that were taken and not yet admitted."""
    num_admitted: int
    """Sessions admitted and not yet trained."""
    num_trained: int
    """Sessions, since the process began; so with the next two."""
    num_unscored: int
    rejected: Mapping[str, int]
    """Sessions by reason."""
    failed_groups: Mapping[str, int]
    """Groups whose sessions were all rejected, by the first one's reason."""


class Sessions:
    """Sessions of one gateway replica; a `Door`. For one event loop alone.

    A session lives open -> rewarded -> sealed -> admitted -> trained(step), or ends rejected(reason);
    each step of it and each turn is in the journal, and a new object over the same folder goes on
    where the old one was: open sessions with the agent's next call, sealed ones that were not
    admitted are offered again.

    Args:
        config: Time-outs.
        new_recorder: Makes an empty record.
        folder: Of the run's journal; replicas share it.
        name: Of this replica: 1 to 16 lower-case letters or digits. Part of its keys and ids.
        admin_key_hash: `keys.hash_key` of the admin key.
        peers: Base URLs of all replicas by name; a call for a session of another one is passed on.
        clock: Seconds since the epoch.

    Raises:
        StorageError: The journal cannot be written.
    """

    def __init__(
        self,
        config: SessionsConfig,
        new_recorder: Callable[[], Recorder],
        folder: Path,
        *,
        name: str,
        admin_key_hash: bytes,
        peers: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    # -- for training --------------------------------------------------------------------------

    def open_slot(self) -> None:
        """Training wants one more group: agents may start one, unless one is there already."""
        raise NotImplementedError

    def close_slot(self) -> None:
        """Training has got it, or wants it no more; what agents began goes on."""
        raise NotImplementedError

    async def next_ready(self) -> ReadyGroup:
        """The oldest group that is over and that nobody holds; the caller holds it from then on.

        Its rewards are fixed until it is handed back. Waits for: agents to end their sessions, or
        their time-outs; without a deadline, cancel it.
        """
        raise NotImplementedError

    def hand_back(self, group_key: str) -> None:
        """A group that is held or admitted was lost on its way: it is offered again."""
        raise NotImplementedError

    def admitted(self, session_ids: Sequence[str], group_id: str) -> None:
        """The sessions are in the run's own journal, as `group_id`: they are not offered again.

        Sessions that are not known any more, or were admitted before, are passed over, so that a
        caller may tell twice; so with `trained` and `rejected`.
        """
        raise NotImplementedError

    def trained(self, session_ids: Sequence[str], step: int) -> None:
        """The sessions shaped the weights of `step`: their records are deleted."""
        raise NotImplementedError

    def rejected(self, session_ids: Sequence[str], reason: str) -> None:
        """The sessions will not be trained: their records are deleted."""
        raise NotImplementedError

    def counts(self) -> SessionCounts:
        """What is held here now."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the journal; a new object may take over."""
        raise NotImplementedError

    # -- as a door -----------------------------------------------------------------------------

    async def enter(self, key: str, path_session: str, hints: CallHints) -> SessionRecord:
        """See `Door.enter`."""
        raise NotImplementedError

    def leave(self, record: SessionRecord) -> None:
        """See `Door.leave`."""
        raise NotImplementedError
