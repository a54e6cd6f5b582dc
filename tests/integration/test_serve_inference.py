"""`areal-ray serve inference` as a user starts it: real SDKs, and Ctrl-C."""

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from areal_ray.run_listing import describe_run
from tests.support.command_line import descendants, is_alive
from tests.support.gateway import TOOL
from tests.support.needs import needs_vllm
from tests.support.sdk_clients import SHOWS_ALL
from tests.support.served import Served, serving
from tests.support.tiny_models import write_tiny_model

HELLO: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
PRINTED = dict.fromkeys(range(3, 97), 50)
"""Letters and digits alone: each token of a reply is text that can be shown, none ends it."""
ASKED: dict[str, Any] = {"model": "any", "messages": HELLO, "max_tokens": 24}


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("vllm", marks=[pytest.mark.extended, needs_vllm])],
)
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = write_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(SHOWS_ALL)
    words = (
        f"rollout.engine={{kind: {request.param}, max_context_tokens: 512}}",
        f"rollout.sampling.logit_bias={PRINTED}",
        "cluster.num_cpus=2",
    )
    with serving("inference", str(model), *words, fileroot=folder) as made:
        yield made


def _check_held_to_a_schema(client: openai.OpenAI) -> None:
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": {"enum": ["yes", "no"]}},
    }
    replies = [
        client.chat.completions.create(**ASKED, response_format=wanted, seed=seed).choices[0]
        for seed in range(12)
    ]
    # Where the template knows reasoning, this model may think to its last token.
    whole = [choice.message.content for choice in replies if choice.finish_reason == "stop"]
    assert whole
    assert set(whole) <= {'"yes"', '"no"'}
    wanted["json_schema"]["schema"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**ASKED, response_format=wanted)


def _check_likeliest_tokens(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    parts = [
        chunk.choices[0].logprobs.content
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    assert [token for part in parts for token in part] == content
    assert len(content) > 1
    for token in content:
        told = [one.logprob for one in token.top_logprobs]
        assert told == sorted(told, reverse=True)
        assert len({tuple(one.bytes) for one in token.top_logprobs}) == 3
        assert token.logprob <= told[0]  # a bias drew it; what is told is the policy's own


@pytest.mark.timeout(400)
def test_both_sdks_are_answered_until_ctrl_c(served):
    url, key = served.told("gateway"), served.told("api key")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        ask = client.chat.completions.create
        plain = ask(**ASKED, temperature=0)
        whole = ask(**ASKED, temperature=0, seed=7, tools=[TOOL])
        chunks = list(ask(**ASKED, temperature=0, tools=[TOOL], stream=True))
        told = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(told) == whole.choices[0].message.content
        assert len([piece for piece in told if piece]) > 1
        assert whole.usage.prompt_tokens > plain.usage.prompt_tokens  # the tools are in it
        warm = {ask(**ASKED, temperature=2, seed=s).choices[0].message.content for s in range(3)}
        assert len(warm) > 1
        cold = {ask(**ASKED, temperature=0, seed=s).choices[0].message.content for s in range(3)}
        assert cold == {plain.choices[0].message.content}
        likeliest = ask(**ASKED, temperature=2, seed=1, extra_body={"top_k": 1})
        assert likeliest.choices[0].message.content == plain.choices[0].message.content
        assert client.models.list().data[0].id == str(served.folder.parent / "model")
        _check_held_to_a_schema(client)
        _check_likeliest_tokens(client)
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as other:
        with other.messages.stream(**ASKED, extra_body={"temperature": 0}) as stream:
            pieces = list(stream.text_stream)
        assert "".join(pieces).strip() == plain.choices[0].message.content.strip()
    stranger = openai.OpenAI(base_url=url, api_key="another", max_retries=0)
    with stranger:
        for ask in (lambda: stranger.chat.completions.create(**ASKED), stranger.models.list):
            with pytest.raises(openai.AuthenticationError, match="API key: is not one"):
                ask()

    folder = served.folder
    end = time.monotonic() + 30
    idle = re.compile(rf"gateway-0 {re.escape(url)}, [1-9]\d* calls, 0 under way")
    while not idle.search(describe_run(folder)):
        assert time.monotonic() < end, describe_run(folder)
        time.sleep(0.2)
    assert "rollout-0 version 0" in describe_run(folder)
    below = descendants(served.child.pid)
    os.kill(served.child.pid, signal.SIGINT)
    assert served.child.wait(90) == 130
    end = time.monotonic() + 20
    while left := [pid for pid in below if is_alive(pid)]:
        assert time.monotonic() < end, f"processes are left: {left}"
        time.sleep(0.2)
    said = "".join(served.lines)
    assert "Traceback" not in said
    assert "inference stopped: served for" in said
    assert said.count(key) == 1
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in kept if key.encode() in path.read_bytes()]
