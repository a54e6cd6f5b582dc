"""GatewayActor: the HTTP edge in front of the rollout fleet.

A thin shell: `gateway/` answers calls and keeps records and sessions, `FleetSampler` brings turns
to the replicas. Its state comes from the constructor and its folder alone: after a restart it
listens on the same port, and sessions go on from their journal.

serve_group waits for: agents that end their sessions; unblocked by them and by their time-outs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from areal_ray.core.storage import replace_text, writing
from areal_ray.core.summaries import GroupSummary
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.errors import ArealRayError
from areal_ray.gateway.answer import Answers
from areal_ray.gateway.app import Service, make_app
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.door import Door, OpenDoor
from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.peers import Peers
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.server import GatewayServer
from areal_ray.gateway.session_journal import SessionJournal
from areal_ray.gateway.session_routes import make_sessions_app
from areal_ray.gateway.sessions import Sessions, SlotWithdrawn
from areal_ray.gateway.structured import StructuredOutput
from areal_ray.gateway.template import ChatTemplate, model_context_tokens
from areal_ray.gateway.upstream import Upstreams
from areal_ray.runtime.cluster import own_environment
from areal_ray.runtime.episode_dump import write_episodes
from areal_ray.runtime.fleet_sampler import FleetSampler
from areal_ray.runtime.garbage import collect_rarely
from areal_ray.runtime.gateway_config import EngineFacts, GatewayConfig, SessionTerms
from areal_ray.runtime.gateway_health import GatewayHealth
from areal_ray.runtime.gateway_list import GatewayList, address_file
from areal_ray.runtime.gateway_notes import Note
from areal_ray.runtime.ready_group import as_group, num_rewarded
from areal_ray.runtime.replica_list import reached
from areal_ray.runtime.reply_format import reply_format
from areal_ray.runtime.rollout_client import RolloutClient

_log = logging.getLogger(__name__)

_REBIND_S = 10.0
"""Within it the predecessor's socket is gone."""
_REBIND_EVERY_S = 0.2
_EVERYWHERE = ("0.0.0.0", "::")


class GatewayActor:
    """One replica of the gateway.

    Args:
        name: For messages; `gateway-INDEX`.
        model_path: Checkpoint whose tokenizer and chat template render the prompts.
        config: Address, limits, parsers and policy.
        sampling: How turns are sampled.
        replicas: Rollout actors by name: handles, the names they were spawned under, or the key of
            a list of such names.
        folder: Where its address and its sessions are remembered; the run's journal. Empty =
            nowhere.
        key_hash: `gateway.keys.hash_key` of what clients have to send; empty = nothing. With
            sessions, of the admin key.
        terms: Of the sessions; None = it serves without, each call by itself.
        engine: Of the replicas.
        model_name: What the model list shows.
    """

    def __init__(
        self,
        name: str,
        *,
        model_path: str,
        config: GatewayConfig,
        sampling: SamplingConfig,
        replicas: Mapping[str, Any] | str,
        folder: str = "",
        terms: SessionTerms | None = None,
        key_hash: bytes = b"",
        engine: EngineFacts = EngineFacts(),  # noqa: B008 (frozen)
        model_name: str = "policy",
    ) -> None:
        self._name, self._config = name, config
        self._index = int(name.rpartition("-")[2])
        self._incarnation = uuid4().hex[:12]
        self._folder = Path(folder)
        self._address = address_file(self._folder, str(self._index)) if folder else None
        self._terms = terms
        self._template = template = ChatTemplate.from_folder(model_path)
        reader = reply_format(
            template, config.tool_parser, config.reasoning_parser, where="gateway"
        )
        client_id = f"{name}-{self._incarnation}"  # not what a predecessor asked for
        known = reached(replicas)
        self._rollouts = RolloutClient(known, client_id, deadline_s=config.turn_timeout_s)
        limits = CallLimits(
            sampling.max_new_tokens,
            engine.context_tokens or model_context_tokens(model_path),
            stop=sampling.stop,
        )
        sampler = FleetSampler(self._rollouts, sampling)
        self._peers = Peers()
        self._sessions: Sessions | None = None

        def new_recorder() -> Recorder:
            return Recorder(template, _policy(config), reader)

        door: Door = OpenDoor(new_recorder, key_hash)
        if terms is not None:
            door = self._sessions = self._new_sessions(new_recorder, key_hash)
        self._service = Service(
            answers=Answers(template, reader, sampler, limits=limits),
            upstreams=_upstreams(config),
            structured=_structured(template, reader, config, engine),
            door=door,
            model=model_name,
            created_s=int(time.time()),
            limits=_edge_limits(config),
        )
        if terms is None or self._sessions is None:
            self._app = make_app(self._service)
        else:
            least = terms.least_rewarded
            self._app = make_sessions_app(self._service, self._sessions, least_siblings=least)
        self._server: GatewayServer | None = None
        self._opening, self._has_left = asyncio.Lock(), False
        self._url = ""
        collect_rarely()

    def _new_sessions(self, new_recorder: Callable[[], Recorder], key_hash: bytes) -> Sessions:
        return Sessions(
            self._config.sessions,
            new_recorder,
            SessionJournal(self._folder, str(self._index)),
            admin_key_hash=key_hash,
            peers=lambda: self._peers,
        )

    async def open(self) -> str:
        """Listen, unless it does already; the base URL.

        Raises:
            ArealRayError: The address cannot be had.
        """
        async with self._opening:
            if self._server is None and not self._has_left:
                self._look_around()  # whose calls are whose, before the first one comes
                self._url = await self._listen()
                if self._address is not None:
                    with writing(self._folder):
                        self._folder.mkdir(parents=True, exist_ok=True)
                    replace_text(self._address, self._url)
        self._look_around()
        return self._url

    def _look_around(self) -> None:
        if self._sessions is not None:
            known = GatewayList.read(self._folder, self._config.replicas)
            self._peers = known.peers(self._folder)

    async def health(self) -> GatewayHealth:
        """How it does; one that was restarted listens again from the first such question on."""
        url, counts = await self.open(), self._service.counts
        return GatewayHealth(
            name=self._name,
            incarnation=self._incarnation,
            url=url,
            num_calls=counts.num_calls,
            num_open=counts.num_open,
            num_failed=counts.num_failed,
            num_defects=counts.num_defects,
            num_turns_pending=self._rollouts.num_pending,
            sessions=None if self._sessions is None else self._sessions.counts(),
        )

    async def serve_group(self, group_id: str) -> tuple[GroupSummary | None, bytes]:
        """Have agents start one more group of sessions, unless one is there already; the oldest.

        Args:
            group_id: The lease's.

        Returns:
            The summary, and the group as `core.trajectory.encode_group` writes it. None and
            nothing where it leaves, and no group that was begun is left.
        """
        sessions, terms = self._sessions, self._terms
        assert sessions is not None
        assert terms is not None
        await self.open()
        sessions.open_slot()
        try:
            while True:
                ready = await sessions.next_ready()
                count = num_rewarded(ready)
                if terms.has_reward_function or count >= terms.least_rewarded:
                    break
                sessions.rejected(
                    ready.session_ids,
                    f"{count} of the group's sessions have a reward; admission asks for "
                    f"{terms.least_rewarded}",
                )
        except SlotWithdrawn:  # no error: Ray would show each payload's that nobody fetches
            return None, b""
        finally:
            sessions.close_slot()
        return as_group(ready, group_id, has_reward_function=terms.has_reward_function)

    async def take_notes(self, notes: Sequence[Note]) -> None:
        """What became of sessions; a note that comes twice changes nothing."""
        sessions = self._sessions
        assert sessions is not None
        for note in notes:
            if note.verb == "admitted":
                sessions.admitted(note.sessions, note.fact)
            elif note.verb == "trained":
                sessions.trained(note.sessions, int(note.fact))
            elif note.verb == "rejected":
                sessions.rejected(note.sessions, note.fact)
            else:
                sessions.hand_back(note.session_group)

    async def use_replicas(self, replicas: Mapping[str, Any]) -> None:
        """Sample from these alone from now on; returns once nothing is under way on others."""
        await self._rollouts.use(reached(replicas))

    async def dump_episodes(self, payloads: Sequence[Any], step: int) -> None:
        """Write the episodes of groups that `step` trained on to episodes.jsonl of the run.

        Args:
            payloads: References to encoded groups, in a list so that Ray passes them on unread.
            step: Steps done when they were trained on.
        """
        await write_episodes(payloads, self._template, self._folder.parent, step)

    async def finish(self) -> None:
        """Leave: take no more calls, end those under way in their time, and be found no more."""
        self._has_left = True
        if self._server is not None:
            await self._server.stop(self._config.turn_timeout_s)
        if self._address is not None:
            with writing(self._folder):
                self._address.unlink(missing_ok=True)

    async def close(self) -> None:
        """Let calls end within the server's grace, then abort what is under way."""
        if self._server is not None:
            await self._server.stop()
        if self._service.upstreams is not None:
            await self._service.upstreams.close()
        await self._rollouts.close()

    async def _listen(self) -> str:
        config = self._config
        port = config.port + self._index if config.port else self._remembered_port()
        end_s = time.monotonic() + _REBIND_S
        while True:
            server = GatewayServer(self._app, host=config.host, port=port)
            try:
                url = await server.start()
            except ArealRayError as error:
                if time.monotonic() < end_s:
                    await asyncio.sleep(_REBIND_EVERY_S)
                elif config.port:
                    raise
                else:
                    _log.warning("%s: its port is taken, another has to do: %s", self._name, error)
                    port = 0
                continue
            self._server = server
            return _reachable(url, config.host)

    def _remembered_port(self) -> int:
        if self._address is None or not self._address.exists():
            return 0
        return int(self._address.read_text(encoding="utf-8").rpartition(":")[2])


def _structured(
    template: ChatTemplate, reader: ReplyFormat, config: GatewayConfig, engine: EngineFacts
) -> StructuredOutput:
    mode, why_not = config.structured_output, engine.why_unconstrained
    return StructuredOutput(template, reader, mode=mode, why_not=why_not)


def _policy(config: GatewayConfig) -> RecordPolicy:
    return RecordPolicy(
        dropped_reasoning=config.dropped_reasoning, untaken=config.untaken, aborted=config.aborted
    )


def _edge_limits(config: GatewayConfig) -> EdgeLimits:
    return EdgeLimits(
        body_bytes=config.max_body_bytes, concurrent_calls=config.max_concurrent_calls
    )


def _upstreams(config: GatewayConfig) -> Upstreams:
    environment, keys = own_environment(), {}
    for name, one in config.upstream.items():
        if one.key_env and not environment.get(one.key_env):
            raise ArealRayError(
                f"gateway.upstream.{name}.key_env: {one.key_env} is not set where the gateway "
                "runs. Set it before Ray starts there"
            )
        keys[name] = environment.get(one.key_env, "")
    return Upstreams(config.upstream, keys, timeout_s=config.turn_timeout_s)


def _reachable(url: str, host: str) -> str:
    """The URL with this node's address in it, where the gateway listens on all it has."""
    if host not in _EVERYWHERE:
        return url
    from ray.util import get_node_ip_address

    return f"http://{get_node_ip_address()}:{url.rpartition(':')[2]}"
