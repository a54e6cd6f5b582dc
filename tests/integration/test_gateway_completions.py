"""OpenAI's old Completions over a socket: a raw prompt, and text alone for a reply."""

from typing import Any

import openai
import pytest

from tests.support.gateway import Gateway
from tests.support.scripted_sampler import Said
from tests.support.sdk_clients import CALL, SHOWS_ALL, THOUGHT, prompt_text, run
from tests.support.tiny_models import tiny_tokenizer

PROMPT = "2 + 3 ="
END = 2
"""The id that ends a turn."""


async def whole(gateway: Gateway, **body: Any) -> Any:
    """The completion of a call that is not streamed."""
    async with gateway.client() as client:
        return await client.completions.create(**{"model": "m", "prompt": PROMPT, **body})


async def streamed(gateway: Gateway, **body: Any) -> list[Any]:
    """All chunks of a streamed call."""
    async with gateway.client() as client:
        stream = await client.completions.create(model="m", prompt=PROMPT, stream=True, **body)
        return [chunk async for chunk in stream]


def test_a_raw_prompt_is_in_no_template_and_its_reply_is_text_whatever_it_says():
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, max_tokens=400)
        chunks = await streamed(gateway, max_tokens=400)
        assert reply.choices[0].text == f"{THOUGHT}{CALL}"
        assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text
        assert reply.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        assert (reply.object, reply.model) == ("text_completion", "m")
        assert prompt_text(gateway) == PROMPT
        assert reply.usage.prompt_tokens == len(gateway.sampler.requests[0].prompt_ids)
        (line,) = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        last = gateway.sampler.sampled[gateway.sampler.requests[-1].request_id]
        assert line.token_ids[line.loss_mask].tolist() == last.token_ids.tolist()

    run([Said(f"{THOUGHT}{CALL}")], test, chat_template=SHOWS_ALL)


@pytest.mark.parametrize("wanted", [1, 0, 5])
def test_logprobs_come_by_columns(wanted):
    async def test(gateway: Gateway) -> None:
        told = (await whole(gateway, logprobs=wanted)).choices[0].logprobs
        turn = next(iter(gateway.sampler.sampled.values()))
        assert told.token_logprobs == turn.logprobs.tolist()[:-1]
        assert "".join(told.tokens) == " 5, so"
        pairs = zip(told.text_offset, told.tokens, strict=True)
        assert [" 5, so"[at:][: len(token)] for at, token in pairs] == told.tokens
        assert bool(told.top_logprobs) is bool(wanted)
        chunks = await streamed(gateway, logprobs=wanted)
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        assert [token for part in parts for token in part.tokens] == told.tokens
        assert [at for part in parts for at in part.text_offset] == told.text_offset

    run([Said(" 5, so")], test)


def test_the_likeliest_tokens_and_the_sampled_one_are_told_by_their_text():
    encoded = tiny_tokenizer().encode(" \u20ac5")
    likely = [[(token, -0.25), (ord("a") - 33 + 3, -1.5), (END, -2.5)] for token in encoded]
    likely[0] = [(END, -0.125), (encoded[1], -0.75), (encoded[0], -3.0)]

    async def test(gateway: Gateway) -> None:
        told = (await whole(gateway, logprobs=2)).choices[0].logprobs
        assert told.tokens[0] == " "
        assert told.tokens[1:4] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        assert told.text_offset == [0, 1, 1, 1, 2]
        assert list(told.top_logprobs[0].items()) == [
            ("<|im_end|>", -0.125), ("bytes:\\xe2", -0.75), (" ", told.token_logprobs[0])
        ]  # fmt: skip
        for token, logprob, top in zip(
            told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True
        ):
            assert top == {token: logprob, tiny_tokenizer().decode([67]): -1.5}
        chunks = await streamed(gateway, logprobs=2)
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        assert [top for part in parts for top in part.top_logprobs] == told.top_logprobs
        assert [at for part in parts for at in part.text_offset] == told.text_offset
        assert [request.top_logprobs for request in gateway.sampler.requests] == [2, 2]

    run([Said(ids=encoded, likely=likely)], test)


def test_choices_stop_strings_usage_and_the_limit_of_old():
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, n=2, stop=",")
        assert [choice.text for choice in reply.choices] == [" 5", " 6"]
        chunks = await streamed(gateway, stream_options={"include_usage": True})
        assert chunks[-1].usage.completion_tokens > 0
        assert gateway.sampler.requests[0].max_new_tokens == 16

    run([Said(" 5, so"), Said(" 6, so")], test)


@pytest.mark.parametrize(
    "body",
    [
        *({"prompt": 5}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"prompt": ""}),
        *({"echo": True}, {"suffix": "x"}, {"logprobs": "x"}, {"logprobs": 21}, {"logprobs": -1}),
    ],
)
def test_what_is_not_served_is_a_400(body):
    async def test(gateway: Gateway) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await whole(gateway, extra_body=body)
        assert refused.value.param == next(iter(body))

    run([Said("x")], test)
