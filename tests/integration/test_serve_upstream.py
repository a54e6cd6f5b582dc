"""`areal-ray serve` with providers that serve sessions in place of the policy, under Ray."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from areal_ray.run_listing import describe_run
from recipes.online.sessions import finish, tell
from tests.support.command_line import ROOT
from tests.support.gateway import Gateway
from tests.support.gateway import serving as providing
from tests.support.providers import answering, beside, refusal
from tests.support.scripted_sampler import Said
from tests.support.served import Served, serving
from tests.support.tiny_models import write_tiny_model

HELLO: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
KEY = "the-key-of-the-provider"
TURN_S = 3.0
SLOW = refusal("429 Slow", f"slow down {KEY}", "retry-after: 7")


@pytest.fixture(scope="module")
def provider() -> Iterator[Gateway]:
    script = [Said("It is 42."), Said("As I said, 42."), Said("Hello there"), Said("x", hangs=True)]
    with beside(providing(script)) as made:
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, provider: Gateway) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("upstream")
    write_tiny_model(folder / "tiny")
    closed = socket.create_server(("127.0.0.1", 0))
    nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    closed.close()
    with beside(answering(SLOW)) as busy:
        upstream = {
            "big": {"url": f"{provider.url}/v1", "model": "big-1", "key_env": "BIG_KEY"},
            "down": {"url": nowhere, "model": "none"},
            "busy": {"url": busy, "model": "busy-1", "key_env": "BIG_KEY"},
        }
        words = (
            "name=upstream",
            f"model={{path: {folder}/tiny}}",
            f"gateway.upstream={json.dumps(upstream)}",
            f"gateway.turn_timeout_s={TURN_S}",
            "gateway.replicas=2",
            "cluster.num_cpus=2",
        )
        recipe = str(ROOT / "recipes/online/calculator.yaml")
        with serving(recipe, *words, fileroot=folder, name="upstream", BIG_KEY=KEY) as made:
            yield made


def access(served: Served) -> tuple[list[str], str]:
    """URLs and the admin key, as the server prints them."""
    return served.told("gateway").split(), served.told("admin key")


def begin(served: Served, model: str) -> tuple[str, Any]:
    """A session of a provider, and the URL of the gateway that it is called at: not its own."""
    urls, admin = access(served)
    told = tell(urls[0], "start_session", admin, {"task_id": "t", "model": model})
    home = int(told["session_id"].split("-")[1])
    return urls[1 - home], told


@pytest.mark.timeout(400)
def test_sessions_are_answered_by_the_provider_whole_and_streamed_and_kept_as_text(
    served: Served, provider: Gateway
) -> None:
    url, told = begin(served, "big")
    key = told["api_key"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        ask = client.chat.completions.create
        whole = ask(model="m", messages=HELLO)
        assert whole.choices[0].message.content == "It is 42."
        history = [*HELLO, whole.choices[0].message, {"role": "user", "content": "sure?"}]
        chunks = list(ask(model="m", messages=history, stream=True))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == "As I said, 42."
        assert len([piece for piece in pieces if piece]) > 1
    with (
        anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=32, messages=HELLO) as stream,
    ):
        assert stream.get_final_message().content[0].text == "Hello there"
    assert provider.door.keys[-3:] == [KEY] * 3
    finish(url, told, reward=0.5)
    _, admin = access(served)
    with openai.OpenAI(base_url=url, api_key=admin) as client:
        body = {"session_id": told["session_id"]}
        found: Any = client.post("/export_trajectories", cast_to=object, body=body)
    (session,) = found["sessions"]
    assert (session["upstream"], session["reward"], session["state"]) == ("big", 0.5, "sealed")
    assert [turn["reply"]["content"] for turn in session["turns"]] == [
        *("It is 42.", "As I said, 42.", "Hello there"),
    ]
    assert "token_ids" not in json.dumps(found)
    assert_no_key_was_written(served.folder)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "says"),
    [("down", 503, "upstream down"), ("busy", 429, "slow down ***")],
)
def test_a_provider_that_is_down_or_busy_is_told_and_the_session_goes_on(
    served: Served, model: str, status: int, says: str, is_streamed: bool
) -> None:
    url, told = begin(served, model)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=told["api_key"], max_retries=0) as client:
        for _ in range(2):
            with pytest.raises(openai.APIError) as error:
                list(client.chat.completions.create(model="m", messages=HELLO, stream=is_streamed))
            assert says in str(error.value)
            assert KEY not in str(error.value)
        if not is_streamed:
            assert error.value.status_code == status
    finish(url, told, reward=0.0)


@pytest.mark.timeout(400)
def test_a_provider_that_is_too_slow_is_given_up_and_its_call_ended(
    served: Served, provider: Gateway
) -> None:
    """The last of its script hangs after it has said something."""
    url, told = begin(served, "big")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=told["api_key"], max_retries=0) as client:
        begun = time.monotonic()
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="m", messages=HELLO, stream=True))
        assert TURN_S * 0.9 < time.monotonic() - begun < TURN_S + 30
    end = time.monotonic() + 30
    while provider.sampler.num_running:
        assert time.monotonic() < end, "the provider still works on it"
        time.sleep(0.05)
    finish(url, told, reward=0.0)
    assert "gateway-0" in describe_run(served.folder)


def assert_no_key_was_written(folder: Path) -> None:
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in kept if KEY.encode() in path.read_bytes()]
