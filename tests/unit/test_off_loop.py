"""Long conversations are taken up beside the event loop, and recorded as short ones are."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from areal_ray.core.turn import TurnRequest
from areal_ray.gateway.call import Call, CallError, CallReply
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.off_loop import LARGE_CHARACTERS, OF_A_TOKEN
from areal_ray.gateway.openai_chat import OpenAIChat
from tests.support.gateway import Gateway, ask, make_gateway
from tests.support.scripted_sampler import Said
from tests.unit.test_answer import answered, begun, read

SHORT = [{"role": "user", "content": "2+3?"}]
LONG = [
    {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 40} for i in range(399)
]
LIMITS = CallLimits(8, 1 << 20)


def gateway() -> Gateway:
    return make_gateway([Said("5")], limits=LIMITS)


async def ticks_during(work: Any) -> int:
    """Times that another task of the loop got its turn before the work was done."""
    count = 0
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)  # it begins
    while not task.done():
        count += 1
        await asyncio.sleep(0)
    task.result()
    return count


def test_the_loop_goes_on_while_a_long_conversation_is_taken_up_and_a_short_one_waits_for_none():
    async def go() -> None:
        for messages, goes_on in ((SHORT, False), (LONG, True)):
            asked = gateway()
            assert bool(await ticks_during(begun(asked, messages=messages))) == goes_on
            call, answers = read(messages=messages), asked.service.answers
            assert bool(await ticks_during(answers.count_prompt_tokens(call))) == goes_on

    asyncio.run(go())


def test_a_large_body_is_read_beside_the_loop_and_its_faults_are_told():
    async def go() -> None:
        body = {"model": "m", "messages": [*LONG[:1], {"role": "user", "content": 7}]}
        body["messages"][0] = {"role": "user", "content": "x" * LARGE_CHARACTERS}
        answered = await ask(gateway(), body)
        assert answered.status == 400
        assert answered.json()["error"]["param"] == "messages[1].content"
        answered = await ask(gateway(), json.dumps(body).encode()[:-1])
        assert answered.status == 400

    asyncio.run(go())


def test_a_call_that_is_cancelled_while_it_is_taken_up_leaves_no_turn_open():
    over: list[tuple[int, str]] = []

    async def go() -> Gateway:
        asked = gateway()
        asked.door.record().turn_over = lambda turn_id, reply_id: over.append((turn_id, reply_id))
        task = asyncio.ensure_future(begun(asked, messages=LONG))
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asked

    asked = asyncio.run(go())
    assert over == [(0, "")]
    assert asked.recorder.num_turns == 1
    assert asked.recorder.left_out == {"aborted": 1}


def test_calls_of_one_session_side_by_side_each_get_the_prompt_of_their_own_conversation():
    def script(request: TurnRequest) -> Said:
        return Said(f"{len(request.prompt_ids)}")

    async def go() -> None:
        asked = make_gateway(script, limits=LIMITS)
        asked_for = [LONG[: 2 * n + 1] if n % 2 else SHORT for n in range(60, 90)]

        async def one(messages: Any) -> str:
            return (await (await begun(asked, messages=messages)).whole()).choices[0].text

        told = await asyncio.gather(*map(one, asked_for))
        assert asked.recorder.num_turns == len(asked_for)
        alone = gateway().service.answers
        counts = [await alone.count_prompt_tokens(read(messages=said)) for said in asked_for]
        assert told == [str(count) for count in counts]

    asyncio.run(go())


def test_a_conversation_that_fills_the_context_is_refused_and_closed():
    async def go() -> None:
        small = make_gateway([Said("5")], limits=CallLimits(8, 5000))
        with pytest.raises(CallError, match="too long"):
            await begun(small, messages=LONG[:101])

    asyncio.run(go())


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"logprobs": True}])
def test_the_loop_goes_on_while_a_long_reply_is_read_and_a_short_one_waits_for_none(more):
    async def go() -> None:
        for num_words, goes_on in ((1, False), (LARGE_CHARACTERS // OF_A_TOKEN, True)):
            said = Said("word " * num_words, chunk_tokens=LARGE_CHARACTERS)
            asked = make_gateway([said], limits=CallLimits(1 << 20, 1 << 20))
            answer = await begun(asked, messages=SHORT, **more)
            assert bool(await ticks_during(answered(answer, **more))) == goes_on
            assert asked.recorder.num_turns == 1

    asyncio.run(go())


def test_a_call_that_is_cancelled_while_its_long_reply_is_read_has_it_recorded_once():
    over: list[tuple[int, str]] = []

    async def go() -> Gateway:
        said = Said("word " * LARGE_CHARACTERS)
        asked = make_gateway([said], limits=CallLimits(1 << 20, 1 << 20))
        asked.door.record().turn_over = lambda turn_id, reply_id: over.append((turn_id, reply_id))
        answer = await begun(asked, messages=SHORT)
        task = asyncio.ensure_future(answer.whole())
        await asyncio.sleep(0)
        for _ in range(2):  # who cancels twice gets it no sooner
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer.abandon("the call broke off")
        assert over == [(0, answer.opening.id)]
        return asked

    asked = asyncio.run(go())
    assert asked.recorder.num_turns == 1
    assert asked.recorder.left_out == {}


class NotingChat(OpenAIChat):
    """Chat that notes on which thread it writes."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def write(self, call: Call, reply: CallReply) -> dict[str, Any]:
        self.threads.append(threading.current_thread())
        return super().write(call, reply)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_long_answer_is_written_beside_the_loop(logprobs):
    """With log-probs each token is a line of its own: fewer make a long one."""
    long = LARGE_CHARACTERS // OF_A_TOKEN // (16 if logprobs else 1)
    for num_tokens, is_beside in ((long - 1, False), (long, True)):
        said = Said(ids=[65] * num_tokens)
        asked, chat = make_gateway([said], limits=CallLimits(1 << 20, 1 << 20)), NotingChat()
        asked.service = replace(asked.service, dialects=(chat,))
        answer = asyncio.run(ask(asked, {"messages": SHORT, "logprobs": logprobs}))
        assert answer.status == 200
        assert answer.json()["usage"]["completion_tokens"] == num_tokens
        assert [one is not threading.main_thread() for one in chat.threads] == [is_beside]
