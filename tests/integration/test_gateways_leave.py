"""A replica of the gateway that leaves: it starts nothing, ends what it has, and loses nothing."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from areal_ray.gateway.peers import Peers
from areal_ray.gateway.sessions import SlotWithdrawn
from tests.support.scripted_sampler import Said
from tests.support.sessions import FIXED_KEY, HELLO, Replica, serve_replica


@dataclass
class Pair:
    """Two replicas; the one that has the fixed key's sessions is the home."""

    home: Replica
    other: Replica
    peers: Peers

    def leave(self) -> None:
        """The home starts nothing more."""
        self.peers = replace(self.peers, leaving=frozenset({self.home.sessions.name}))

    def is_home(self, session_id: str) -> bool:
        return session_id.startswith(f"s-{self.home.sessions.name}-")


@asynccontextmanager
async def serving_two(folder: Path, **config: Any) -> AsyncGenerator[Pair, None]:
    """Each says where it was sampled."""
    known: list[Pair] = []

    def peers() -> Peers:
        return known[0].peers if known else Peers()

    async with asyncio.timeout(120):
        made = {
            name: await serve_replica(
                folder, [Said(f"at {name}")], name=name, peers=peers, **config
            )
            for name in ("a", "b")
        }
        urls = {name: one.url for name, one in made.items()}
        all_of_them = Peers(urls, frozenset(urls))
        home = all_of_them.home(FIXED_KEY)
        other = all_of_them.others(home)[0]
        known.append(Pair(made[home], made[other], all_of_them))
        try:
            yield known[0]
        finally:
            for one in made.values():
                await one.stop()
                assert one.service.counts.num_defects == 0


async def said(replica: Replica, key: str) -> str:
    """The reply to one call."""
    async with replica.client(key) as client:
        reply = await client.chat.completions.create(model="m", messages=HELLO)
    return str(reply.choices[0].message.content)


async def start(replica: Replica, **body: Any) -> Any:
    status, told, _ = await replica.rl("/rl/start_session", task_id="t", **body)
    assert status == 200, told
    return told


def test_sessions_that_were_begun_go_on_and_others_start_elsewhere_whoever_is_asked(tmp_path):
    async def go() -> None:
        async with serving_two(tmp_path) as pair:
            home, other = pair.home, pair.other
            for one in (home, home, other, other):
                one.sessions.open_slot()
            begun = await start(home)
            pair.leave()
            for asked in (home, other):
                told = await start(asked, request_id=f"at {asked.url}")
                assert not pair.is_home(told["session_id"])
                assert await said(asked, told["api_key"]) == f"at {other.sessions.name}"
            assert (await home.rl("/rl/start_session", task_id="t"))[0] == 429
            with pytest.raises(SlotWithdrawn):  # a group that nobody begins any more
                await home.sessions.next_ready()
            home.sessions.close_slot()
            served = asyncio.create_task(home.sessions.next_ready())
            for asked in (home, other):
                assert await said(asked, begun["api_key"]) == f"at {home.sessions.name}"
            await other.rl("/rl/set_reward", begun["api_key"], reward=1)
            await other.rl("/rl/end_session", begun["api_key"])
            assert (await served).session_ids == (begun["session_id"],)
            home.sessions.admitted([begun["session_id"]], "g")
            assert home.sessions.counts().num_sessions == 1
            home.sessions.trained([begun["session_id"]], 1)
            assert home.sessions.counts().num_sessions == 0

    asyncio.run(go())


@pytest.mark.parametrize("via", ["home", "other"])
def test_a_fixed_key_stays_with_its_session_and_goes_with_the_next_one(tmp_path, via):
    async def go() -> None:
        async with serving_two(tmp_path) as pair:
            home, other, asked = pair.home, pair.other, getattr(pair, via)
            home.sessions.open_slot()
            first = await start(other, api_key=FIXED_KEY)
            assert pair.is_home(first["session_id"])
            pair.leave()
            assert {await said(one, FIXED_KEY) for one in (home, other)} == {
                f"at {home.sessions.name}"
            }
            told = await asked.rl("/rl/start_session", task_id="t", api_key=FIXED_KEY)
            assert told[0] == 429  # no room: the session that it has is not given up for that
            assert await said(asked, FIXED_KEY) == f"at {home.sessions.name}"
            assert (await asked.rl("/rl/set_reward", FIXED_KEY, reward=1))[0] == 200
            other.sessions.open_slot()
            second = await start(asked, api_key=FIXED_KEY, request_id="r")
            assert not pair.is_home(second["session_id"])
            assert (await start(asked, api_key=FIXED_KEY, request_id="r")) == second
            assert {await said(one, FIXED_KEY) for one in (home, other)} == {
                f"at {other.sessions.name}"
            }
            assert (await home.sessions.next_ready()).session_ids == (first["session_id"],)
            live = [one.sessions.rules.live_of_key(FIXED_KEY) for one in (home, other)]
            assert live[0] is None
            assert live[1] is not None

    asyncio.run(go())


def test_feedback_for_a_fixed_key_s_last_session_there_still_finds_it(tmp_path):
    async def go() -> None:
        async with serving_two(tmp_path) as pair:
            pair.home.sessions.open_slot()
            first = await start(pair.other, api_key=FIXED_KEY)
            await said(pair.other, FIXED_KEY)
            assert (await pair.other.rl("/rl/end_session", FIXED_KEY))[0] == 200
            pair.leave()
            status, told, _ = await pair.other.rl("/rl/set_reward", FIXED_KEY, reward=0.5)
            assert (status, told["session_id"]) == (200, first["session_id"])
            for one in (pair.home, pair.other):
                with pytest.raises(openai.APIStatusError) as error:
                    await said(one, FIXED_KEY)
                assert error.value.status_code == 410
            group = await pair.home.sessions.next_ready()
            assert [t.reward for t in group.trajectories] == [0.5]

    asyncio.run(go())


def test_a_replica_that_comes_takes_no_fixed_key_from_the_one_that_has_its_session(tmp_path):
    keys = [f"deployed-agent-number-{number:03}" for number in range(200)]
    begun = Peers({"0": "u0", "1": "u1"}, frozenset({"0", "1"}))
    grown = Peers({**begun.urls, "2": "u2"}, begun.founders)
    assert [grown.home(key) for key in keys] == [begun.home(key) for key in keys]
    assert {begun.home(key) for key in keys} == {"0", "1"}
    left = Peers({"0": "u0", "2": "u2"}, begun.founders)
    assert {left.home(key) for key in keys} == {"0"}
    assert {begun.successor(key) for key in keys} == {"0", "1"}
    leaving = replace(begun, leaving=frozenset({"1"}))
    assert {leaving.successor(key) for key in keys} == {"0"}
