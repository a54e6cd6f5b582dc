"""Sessions over sockets: real SDK, restarts in mid-session and mid-stream, several replicas."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from areal_ray.gateway.peers import Peers
from tests.support.scripted_sampler import Said
from tests.support.sessions import (
    ADMIN_KEY,
    FIXED_KEY,
    HELLO,
    Replica,
    sampled,
    sampled_ids,
    serve_replica,
    serving_sessions,
)

ENDLESS = Said("and so on " * 40, pause_s=0.01, hangs=True)


def run(
    folder: Path, script: Any, test: Callable[[Replica], Awaitable[None]], **options: Any
) -> None:
    """Serve the script with sessions and let the test at them."""

    async def go() -> None:
        async with asyncio.timeout(120), serving_sessions(folder, script, **options) as replica:
            await test(replica)

    asyncio.run(go())


async def started(replica: Replica, **body: Any) -> Any:
    """A session that training has a slot for."""
    replica.sessions.open_slot()
    status, told, _ = await replica.rl("/rl/start_session", task_id="t", **body)
    assert status == 200
    return told


async def asked(replica: Replica, key: str, messages: Any = HELLO, **options: Any) -> Any:
    """One call with the SDK."""
    client = replica.client(key)  # a stream needs it beyond this call
    return await client.chat.completions.create(model="m", messages=messages, **options)


def test_an_sdk_agent_with_a_session_key_becomes_a_trajectory(tmp_path):
    async def test(replica: Replica) -> None:
        told = await started(replica, group_size=2)
        for number, one in enumerate(told["sessions"]):
            key = one["api_key"]
            first = await asked(replica, key)
            history = [*HELLO, first.choices[0].message, {"role": "user", "content": "sure?"}]
            stream = await asked(replica, key, history, stream=True)
            async for _ in stream:
                pass
            body = {"interaction_id": first.id, "reward": 0.5}
            assert (await replica.rl("/rl/set_reward", key, **body))[0] == 200
            assert (await replica.rl("/v1/rl/set_reward", key, reward=number))[0] == 200
            status, ended, _ = await replica.rl("/rl/end_session", key)
            assert (status, ended["interaction_count"]) == (200, 2)
            assert (await replica.rl("/rl/end_session", key))[0] == 410
            with pytest.raises(openai.APIStatusError) as error:
                await asked(replica, key)
            assert error.value.status_code == 410
        group = await replica.sessions.next_ready()
        assert [t.reward for t in group.trajectories] == [0.5, 1.5]
        assert group.num_turns == 4
        assert sampled(group) == [[*sampled_ids("a"), *sampled_ids("b")]] * 2

    run(tmp_path, [Said("a"), Said("b")] * 2, test)


async def listed_models(replica: Replica, key: str) -> list[str]:
    """Names that a key is shown; none where it is refused."""
    async with replica.client(key) as client:
        try:
            return [model.id async for model in client.models.list()]
        except openai.AuthenticationError:
            return []


def test_a_misspelt_field_is_refused_and_changes_nothing(tmp_path):
    async def test(replica: Replica) -> None:
        told = await started(replica)
        await asked(replica, told["api_key"])
        status, error, _ = await replica.rl(
            "/v1/rl/set_reward", told["api_key"], reward=1, turn_id=0
        )
        assert (status, error["error"]["param"]) == (400, "turn_id")
        assert "is no field of /rl/set_reward; must be one of" in error["error"]["message"]
        status, told, _ = await replica.rl("/rl/start_session", task_id="t", group_sise=2)
        assert (status, told["error"]["param"]) == (400, "group_sise")
        assert replica.sessions.counts().num_open == 1
        assert replica.sessions.counts().num_waiting == 0

    run(tmp_path, [Said("a")], test)


def test_what_areal_s_own_clients_send_is_taken_with_nulls_and_a_model(tmp_path):
    async def test(replica: Replica) -> None:
        key = (await started(replica, api_key=None, group_size=1))["api_key"]
        await asked(replica, key)
        reward = {"interaction_id": None, "reward": 1.0, "model": "default"}
        assert (await replica.rl("/rl/set_reward", key, **reward))[0] == 200
        assert (await replica.rl("/rl/end_session", key))[0] == 200
        group = await replica.sessions.next_ready()
        assert [t.reward for t in group.trajectories] == [1.0]

    run(tmp_path, [Said("a")], test)


def test_without_a_slot_a_start_is_told_when_to_come_again(tmp_path):
    async def test(replica: Replica) -> None:
        status, told, headers = await replica.rl("/rl/start_session", task_id="t")
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert told["error"]["code"] == "no_capacity"
        for key, path in ((FIXED_KEY, "/rl/start_session"), ("", "/export_trajectories")):
            assert (await replica.rl(path, key, task_id="t"))[0] == 401
        assert (await replica.rl("/rl/start_session", task_id=7))[0] == 400
        with pytest.raises(openai.AuthenticationError):
            await asked(replica, FIXED_KEY)

    run(tmp_path, [Said("a")], test)


def test_a_call_under_way_ends_with_the_time_of_its_session_however_it_trickles(tmp_path):
    """A token now and then starts nothing anew: the slot is free at the time that was set."""

    async def test(replica: Replica) -> None:
        told = await started(replica, group_size=2)
        keys = [one["api_key"] for one in told["sessions"]]

        async def whole() -> None:
            await asked(replica, keys[0])

        async def streamed() -> None:
            async for _ in await asked(replica, keys[1], stream=True):
                pass

        async with asyncio.timeout(30):
            ends = await asyncio.gather(whole(), streamed(), return_exceptions=True)
            while replica.sampler.num_running:
                await asyncio.sleep(0.01)
        assert [type(one) for one in ends] == [openai.APIStatusError, openai.APIError]
        assert all("its time is up" in str(one) for one in ends)
        assert len(replica.sampler.aborted) == 2
        async with asyncio.timeout(10):
            while replica.sessions.counts().num_sessions:
                replica.sessions.rules.sweep()
                await asyncio.sleep(0.1)
        assert replica.sessions.counts().rejected == {"session_timeout": 2}

    slow = Said("word " * 1000, pause_s=0.05, hangs=True)
    run(tmp_path, [slow], test, session_timeout_s=1.5, feedback_timeout_s=0)


def test_an_idempotency_key_in_the_header_counts_like_a_request_id(tmp_path):
    async def test(replica: Replica) -> None:
        replica.sessions.open_slot()
        headers = {"idempotency-key": "once"}
        first = await replica.rl("/rl/start_session", headers=headers, task_id="t")
        second = await replica.rl("/rl/start_session", headers=headers, task_id="t")
        assert first[:2] == second[:2]

    run(tmp_path, [Said("a")], test)


@pytest.mark.parametrize("style", ["individual", "concat", "tree"])
def test_an_ended_session_is_exported_as_it_was_sampled(tmp_path, style):
    async def test(replica: Replica) -> None:
        told = await started(replica)
        key = told["api_key"]
        first = await asked(replica, key)
        history = [*HELLO, first.choices[0].message, {"role": "user", "content": "sure?"}]
        await asked(replica, key, history)
        await replica.rl("/rl/set_reward", key, reward=1)
        which = {"session_id": told["session_id"], "style": style, "discount": 0.5}
        assert (await replica.rl("/export_trajectories", **which, wait_s=0))[0] == 409
        waiting = asyncio.create_task(replica.rl("/export_trajectories", **which))
        await replica.rl("/rl/end_session", key)
        status, exported, _ = await waiting
        assert status == 200
        (session,) = exported["sessions"]
        assert session["reward"] == 1
        both = [sampled_ids("a"), sampled_ids("b")]
        if style == "tree":
            assert [turn["token_ids"] for turn in session["turns"]] == both
            return
        rows = [
            [t for t, mask in zip(row["token_ids"], row["loss_mask"], strict=True) if mask]
            for row in session["trajectories"]
        ]
        assert rows == (both if style == "individual" else [both[0] + both[1]])
        rewards = [row["reward"] for row in session["trajectories"]]
        assert rewards == ([0.5, 1] if style == "individual" else [1])
        assert (await replica.rl("/export_trajectories", session_id="s-a-none"))[0] == 404
        assert (await replica.rl("/export_trajectories", key, **which))[0] == 401

    run(tmp_path, [Said("a"), Said("b")], test)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_gateway_that_is_lost_in_mid_session_is_followed_by_one_that_goes_on(
    tmp_path, is_streaming
):
    async def go() -> None:
        script = [Said("a"), ENDLESS] if is_streaming else [Said("a")]
        replica = await serve_replica(tmp_path, script, grace_s=0.2)
        done = await started(replica)
        await asked(replica, done["api_key"])
        await replica.rl("/rl/set_reward", done["api_key"], reward=1)
        await replica.rl("/rl/end_session", done["api_key"])
        replica.sampler.requests.clear()
        told = await started(replica)
        key = told["api_key"]
        first = await asked(replica, key)
        history = [*HELLO, first.choices[0].message, {"role": "user", "content": "sure?"}]
        if is_streaming:
            stream = await asked(replica, key, history, stream=True)
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
        port = int(replica.url.rsplit(":", 1)[1])
        await replica.stop()
        async with serving_sessions(tmp_path, [Said("b")], port=port) as after:
            await asked(after, key, history)
            await after.rl("/rl/set_reward", key, reward=2)
            await after.rl("/rl/end_session", key)
            groups = [await after.sessions.next_ready() for _ in range(2)]
            assert [group.session_ids[0] for group in groups] == [
                done["session_id"],
                told["session_id"],
            ]
            assert sampled(groups[1]) == [[*sampled_ids("a"), *sampled_ids("b")]]
            assert groups[1].trajectories[0].reward == 2

    asyncio.run(asyncio.wait_for(go(), 120))


def test_calls_side_by_side_stay_in_their_sessions(tmp_path):
    async def test(replica: Replica) -> None:
        told = [await started(replica) for _ in range(12)]

        async def agent(number: int, one: Any) -> None:
            key = one["api_key"]
            for turn in range(3):
                said = [{"role": "user", "content": f"agent {number} turn {turn}"}]
                await asked(replica, key, said, stream=bool(turn % 2))
            await replica.rl("/rl/set_reward", key, reward=number)
            await replica.rl("/rl/end_session", key)

        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(told):
                tasks.create_task(agent(number, one))
        for number, one in enumerate(told):
            status, content, _ = await replica.rl(
                "/export_trajectories", session_id=one["session_id"], style="tree"
            )
            assert status == 200
            text = json.dumps([turn["messages"] for turn in content["sessions"][0]["turns"]])
            assert text.count("agent ") == text.count(f"agent {number} turn") == 3

    run(tmp_path, [Said("a")], test)


# -- replicas side by side -----------------------------------------------------------------------


def test_any_replica_takes_any_call_and_passes_it_on(tmp_path):
    async def go() -> None:
        urls: dict[str, str] = {}
        replicas = {
            name: await serve_replica(tmp_path, script, name=name, peers=lambda: Peers(urls))
            for name, script in (("a", [Said("at a")]), ("b", [Said("at b", pause_s=0.01)]))
        }
        urls.update({name: replica.url for name, replica in replicas.items()})
        a, b = replicas["a"], replicas["b"]
        b.sessions.open_slot()
        status, told, _ = await a.rl("/rl/start_session", task_id="t", request_id="r")
        assert status == 200
        key = told["api_key"]
        assert key.startswith("ar-b-")
        reply = await asked(a, key)
        assert reply.choices[0].message.content == "at b"
        text, num_chunks = "", 0
        async for chunk in await asked(a, key, stream=True):
            num_chunks += 1
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == "at b"
        assert num_chunks > 2
        for known, shown in ((key, ["policy"]), (ADMIN_KEY, ["policy"]), ("ar-b-of-nobody", [])):
            assert await listed_models(a, known) == shown
        body = {"session_id": told["session_id"], "reward": 1}
        assert (await a.rl("/rl/set_reward", **body))[0] == 200
        found = await a.rl("/rl/set_reward", interaction_id=reply.id, reward=1)
        assert found[1]["session_id"] == told["session_id"]
        assert (await a.rl("/rl/end_session", key))[0] == 200
        which = {"session_id": told["session_id"], "style": "concat"}
        assert (await a.rl("/export_trajectories", **which))[1]["sessions"][0]["reward"] == 2
        assert (await a.rl("/export_trajectories", session_id="s-b-none"))[0] == 404
        assert (await a.rl("/rl/start_session", task_id="t"))[0] == 429
        for each in replicas.values():
            each.sessions.open_slot()
            each.sessions.open_slot()
        names = {
            (await each.rl("/rl/start_session", task_id="t", api_key=FIXED_KEY))[1]["session_id"][
                :4
            ]
            for each in replicas.values()
        }
        assert len(names) == 1
        assert {(await asked(r, FIXED_KEY)).choices[0].message.content for r in (a, b)} == {
            f"at {names.pop()[2]}"
        }
        await b.stop()
        with pytest.raises(openai.InternalServerError) as error:
            await asked(a, key)
        assert error.value.status_code == 503
        await a.stop()

    asyncio.run(asyncio.wait_for(go(), 120))


def test_a_client_that_leaves_a_call_that_was_passed_on_has_it_aborted(tmp_path):
    async def go() -> None:
        urls: dict[str, str] = {}
        a = await serve_replica(tmp_path, [ENDLESS], name="a", peers=lambda: Peers(urls))
        b = await serve_replica(tmp_path, [ENDLESS], name="b", peers=lambda: Peers(urls))
        urls.update(a=a.url, b=b.url)
        told = await started(b)
        stream = await asked(a, told["api_key"], stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(20):
            while b.sampler.num_running or not b.sampler.aborted:
                await asyncio.sleep(0.01)
        await a.stop()
        await b.stop()

    asyncio.run(asyncio.wait_for(go(), 120))


def test_no_key_is_in_any_log_or_file(tmp_path, caplog):
    async def test(replica: Replica) -> None:
        told = [await started(replica), await started(replica, api_key=FIXED_KEY)]
        await asked(replica, FIXED_KEY)
        await asked(replica, told[0]["api_key"])
        await replica.rl("/rl/end_session", told[0]["api_key"])
        with pytest.raises(openai.APIStatusError):
            await asked(replica, told[0]["api_key"])
        status, content, _ = await replica.rl(
            "/export_trajectories", session_id=told[0]["session_id"], style="tree", wait_s=0
        )
        assert status == 409
        written = caplog.text + json.dumps(content)
        written += "".join(p.read_bytes().decode("latin-1") for p in tmp_path.rglob("*.seg"))
        for secret in (ADMIN_KEY, FIXED_KEY, told[0]["api_key"]):
            assert secret not in written

    with caplog.at_level(logging.DEBUG, logger="areal_ray"):
        run(tmp_path, [Said("a")], test)
