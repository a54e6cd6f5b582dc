"""Several gateways under Ray: sessions used through any of them; they die, come and go."""

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from areal_ray import launch
from areal_ray.control import ask_to_scale
from areal_ray.errors import PlacementError
from areal_ray.recipe import parse_recipe
from recipes.online.sessions import finish, start
from tests.support.online import (
    HELLO,
    RECIPE,
    acknowledged,
    agent_program,
    client_of,
    sessions_trained,
    told,
    unaccounted,
)
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    actor_names,
    assert_books_balance,
    events_of,
    pid_of,
    steps_of,
    until,
    until_step,
)

PRINTED = dict.fromkeys(range(3, 97), 50)
"""Letters and digits alone, and no end: a reply is as long as it may be."""
LONG = ("rollout.engine.max_context_tokens=1024", "rollout.sampling.max_new_tokens=800")
PROGRAM = ("--groups", "4", "--group-size", "2")


def online(runs: Runs, name: str, *overrides: str, **how: Any) -> Any:
    """A small online run over the tiny model, in which no session gets too old to train."""
    words = [
        f"name={name}",
        f"cluster.fileroot={runs.folder}",
        f"model={{path: {runs.folder}/tiny}}",
        "admission={groups_per_step: 2, n_samples: 2, min_scored_samples: 1, "
        "max_head_offpolicyness: unlimited, max_concurrent_rollouts: 6}",
        "gateway.sessions.idle_timeout_s=300",
        "learner.ppo_n_minibatches=1",
        "checkpoint.every_steps=1",
        "telemetry.console=off",
    ]
    return launch(RECIPE, [*words, *overrides], **how)


def home_of(session: dict[str, str]) -> int:
    """Number of the gateway that a session belongs to."""
    return int(session["session_id"].split("-")[1])


def owners(folder: Path) -> dict[str, set[str]]:
    """By session, the gateways whose journal has it."""
    found: dict[str, set[str]] = {}
    for path in folder.glob("journal/sessions-*.seg"):
        name = path.name.split("-")[1]
        for word in path.read_bytes().split(b'"'):
            if word.startswith(b"s-"):
                found.setdefault(word.decode(), set()).add(name)
    return found


@pytest.mark.extended
def test_two_gateways_share_their_sessions_and_the_death_of_one_loses_none(runs: Runs) -> None:
    handle = online(runs, "two", "gateway.replicas=2", "steps=8", *LONG)
    log = runs.folder / "two-sessions.jsonl"
    try:
        access = handle.wait_for_gateway(PATIENCE_S)
        urls, admin = access.urls, access.admin_key
        assert len(set(urls)) == 2
        assert access.lines().splitlines()[0].split()[1:] == list(urls)
        by_hand = [start(url, admin, "by hand", group_size=2) for url in urls]
        for session in by_hand[0]:
            at, via = urls[home_of(session)], urls[1 - home_of(session)]
            assert told(via, session)
            with (
                anthropic.Anthropic(base_url=at, api_key=session["api_key"]) as client,
                client.messages.stream(model="m", max_tokens=24, messages=HELLO) as stream,
            ):
                assert stream.get_final_text()
        victim = home_of(by_hand[1][0])
        for url, session in zip(urls, by_hand[1], strict=True):
            # Amid a stream of its own, and amid one that the other passes on.
            until(lambda u=url, s=session: _breaks(u, s, "two", victim), "a stream to be broken")
            assert told(url, session, stream=True)
        with agent_program(handle, log, *PROGRAM):
            for session in [one for group in by_hand for one in group]:
                finish(urls[1 - home_of(session)], session, reward=1.0)
            summary = handle.wait(PATIENCE_S)
    finally:
        handle.stop()
    assert (summary.outcome, summary.steps) == ("finished", 8)
    assert any(f"gateway-{victim}" in line and "back" in line for line in summary.replaced)
    assert_books_balance(handle.folder)
    trained = sessions_trained(handle.folder)
    assert max(Counter(trained).values()) == 1
    mine = [one["session_id"] for group in by_hand for one in group]
    assert set(mine) <= set(trained)
    assert not unaccounted(handle.folder, runs.folder / "tiny", [*acknowledged(log), *mine])
    assert {len(names) for names in owners(handle.folder).values()} == {1}
    assert {home_of({"session_id": one}) for one in trained} == {0, 1}


def _breaks(url: str, session: dict[str, str], run: str, victim: int) -> bool:
    """Whether a stream was still under way when the gateway behind it was killed."""
    with client_of(url, session) as client:
        chunks = client.chat.completions.create(model="m", messages=HELLO, stream=True)
        if not any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks):
            return False  # random weights may say nothing at all
        os.kill(pid_of(run, f"gateway-{victim}"), signal.SIGKILL)
        try:
            for _ in chunks:
                pass
        except (openai.APIError, httpx.HTTPError):
            return True
    return False


def test_gateways_of_an_online_run_come_and_go_and_agents_keep_their_url(runs: Runs) -> None:
    handle = online(runs, "gateways", "steps=20000", "gateway.sessions.idle_timeout_s=120")
    log = runs.folder / "gateways-sessions.jsonl"
    try:
        access = handle.wait_for_gateway(PATIENCE_S)
        with agent_program(handle, log, *PROGRAM) as program:
            until_step(handle, 1)
            said = ask_to_scale(handle.folder, {"gateway": 3}, patience_s=PATIENCE_S)
            assert said == "gateway: 1 -> 3"
            urls = [access.url, *(url_of(handle, f"gateway-{n}") for n in (1, 2))]
            kept = started_at(2, urls[2], access.admin_key)
            assert told(urls[0], kept[0])
            said = ask_to_scale(handle.folder, {"gateway": 1}, patience_s=PATIENCE_S)
            assert said == "gateway: 3 -> 1"
            until(lambda: _gateways("gateways") == {"gateway-0", "gateway-2"}, "gateway-1 to go")
            until(lambda: handle.status().status["actors"]["gateway"] == "2 (1 leaving)", "status")
            for session in start(urls[2], access.admin_key, "begun elsewhere"):
                assert home_of(session) == 0
                finish(urls[2], session, reward=0.0)
            for session in kept:
                for url in (urls[0], urls[2]):
                    assert told(url, session)
                finish(urls[0], session, reward=1.0)
            until(lambda: _gateways("gateways") == {"gateway-0"}, "gateway-2 to go")
            assert program.poll() is None
            until_step(handle, steps_of(handle.folder)[-1] + 2)
    finally:
        handle.stop()
        summary = handle.wait(PATIENCE_S)
    assert summary.scaled == ("gateway: 1 -> 3", "gateway: 3 -> 1")
    assert "gateway-2 has left" in events_of(handle.folder)
    trained = sessions_trained(handle.folder)
    assert max(Counter(trained).values()) == 1
    assert {one["session_id"] for one in kept} <= set(trained)
    assert not unaccounted(handle.folder, runs.folder / "tiny", acknowledged(log))
    assert {len(names) for names in owners(handle.folder).values()} == {1}
    assert_books_balance(handle.folder)


@pytest.mark.extended
def test_a_resumed_run_takes_up_the_sessions_of_gateways_that_it_has_no_more(runs: Runs) -> None:
    handle = online(runs, "fewer", "steps=2000", "gateway.replicas=2")
    log = runs.folder / "fewer-sessions.jsonl"
    access = handle.wait_for_gateway(PATIENCE_S)
    with agent_program(handle, log, *PROGRAM):
        until_step(handle, 1)
        kept = started_at(1, access.urls[1], access.admin_key)
        assert told(access.urls[0], kept[0])
        finish(access.urls[1], kept[0], reward=1.0)
        handle.stop()
        done = handle.wait(PATIENCE_S).steps
    is_over, statuses = threading.Event(), []
    asking = threading.Thread(target=_ask_on, args=(access.urls[0], kept[1], is_over, statuses))
    asking.start()  # an agent that goes on with its session at a gateway that passes it on
    again = online(runs, "fewer", f"steps={done + 6}", "gateway.replicas=1", resume=True)
    try:
        found = again.wait_for_gateway(PATIENCE_S)
        assert found.urls == access.urls[:1]
        until(lambda: 200 in statuses, "a reply")
        is_over.set()
        asking.join(PATIENCE_S)
        finish(found.url, kept[1], reward=1.0)
        with agent_program(again, log, *PROGRAM):
            summary = again.wait(PATIENCE_S)
    finally:
        is_over.set()
        again.stop()
    assert set(statuses) <= {_NOBODY, 200, 503}, statuses
    assert (summary.outcome, summary.steps) == ("finished", done + 6)
    assert_books_balance(again.folder, resumed=True)
    assert not unaccounted(again.folder, runs.folder / "tiny", acknowledged(log))
    assert {one["session_id"] for one in kept} <= set(sessions_trained(again.folder))


_NOBODY = 0
"""In place of a status: nobody listened, or the connection broke."""


def _ask_on(url: str, session: dict[str, str], is_over: threading.Event, seen: list[int]) -> None:
    """Call the model again and again; `seen` gets the statuses."""
    key, body = {"authorization": f"Bearer {session['api_key']}"}, {"model": "m", "messages": HELLO}
    while not is_over.wait(0.05):
        try:
            reply = httpx.post(f"{url}/v1/chat/completions", headers=key, json=body, timeout=60)
        except httpx.TransportError:
            seen.append(_NOBODY)
        else:
            seen.append(reply.status_code)


@contextmanager
def inference(runs: Runs, name: str, *overrides: str) -> Iterator[Any]:
    """The tiny model, served alone."""
    words = [f"name={name}", f"cluster.fileroot={runs.folder}", "telemetry.console=off"]
    text = f"kind: inference\nname: served\nmodel: {{path: {runs.folder}/tiny}}\n"
    handle = launch(
        parse_recipe(text, [*words, *LONG, f"rollout.sampling.logit_bias={PRINTED}", *overrides])
    )
    try:
        yield handle
    finally:
        handle.stop()
        handle.wait(PATIENCE_S)


@pytest.mark.extended
def test_gateways_and_rollouts_of_a_served_model_come_and_go_under_its_clients(runs: Runs) -> None:
    with inference(runs, "served", "gateway.replicas=2") as handle:
        access = handle.wait_for_gateway(PATIENCE_S)
        session = {"api_key": access.api_key}
        assert len(set(access.urls)) == 2
        replies = {told(url, session)[:40] for url in access.urls}
        assert all(replies)
        with pytest.raises(
            PlacementError, match="no agent actors that can be scaled; it has gatew"
        ):
            ask_to_scale(handle.folder, {"agent": 2}, patience_s=PATIENCE_S)
        assert ask_to_scale(handle.folder, {"rollout": 2, "gateway": 3}, patience_s=PATIENCE_S)
        third = url_of(handle, "gateway-2")
        assert len(told(third, session)) > 100
        with openai.OpenAI(base_url=third, api_key=access.api_key, max_retries=0) as client:
            chunks = client.chat.completions.create(model="m", messages=HELLO, stream=True)
            assert any(chunk.choices[0].delta.content for chunk in chunks)
            going = threading.Thread(
                target=ask_to_scale,
                args=(handle.folder, {"gateway": 2, "rollout": 1}),
                kwargs={"patience_s": PATIENCE_S},
            )
            going.start()
            *_, last = chunks
        assert last.choices[0].finish_reason == "length"
        going.join(PATIENCE_S)
        assert _gateways("served") == {"gateway-0", "gateway-1"}
        host, port = third.removeprefix("http://").split(":")
        with pytest.raises(ConnectionError):
            socket.create_connection((host, int(port)), 10).close()
        assert all(told(url, session, stream=True) for url in access.urls)
        until(lambda: handle.status().status["actors"] == {"gateway": "2", "rollout": "1"}, "it")


def started_at(number: int, url: str, admin: str) -> list[dict[str, str]]:
    """Sessions that one gateway has, once training wants a group of it."""
    while True:
        sessions = start(url, admin, "by hand", group_size=2)
        if home_of(sessions[0]) == number:
            return sessions
        for session in sessions:
            finish(url, session, reward=0.0)


def url_of(handle: Any, name: str) -> str:
    """As the run tells it."""

    def found() -> str:
        line = handle.status().status["services"]["agent"].get(name, "")
        return line.split(",")[0] if line.startswith("http") else ""

    return str(until(found, f"the URL of {name}"))


def _gateways(run: str) -> set[str]:
    return {name.split("/")[1] for name in actor_names(run) if "/gateway-" in name}
