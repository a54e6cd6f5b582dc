"""Model calls answered: prompt from the record, tokens from the sampler, reply read back.

`Answers.begin` fixes the prompts of a call, which is where it can still be refused. What it returns
samples: `whole` at once, `events` as it goes. Whatever ends it early, a client that went away or a
sampler that failed, every turn it opened is closed or aborted in its record.

Waits for: the sampler; unblocked by its answer, its error, or the call's cancellation.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal_ray.core.seeds import derive_seed
from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import (
    PromptedTurn,
    Reply,
    SampledTurn,
    SamplingWishes,
    TurnChunk,
    TurnEnd,
    TurnRequest,
    TurnSampler,
)
from areal_ray.errors import ArealRayError, RequestRefused
from areal_ray.gateway.call import (
    Call,
    CalledTool,
    CallError,
    CallEvent,
    CallOpening,
    CallReply,
    Choice,
    ChoiceEnd,
)
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.door import PROMPT_FILLS_CONTEXT, SessionRecord
from areal_ray.gateway.messages import canonical, in_call_order
from areal_ray.gateway.off_loop import OF_A_TOKEN, OffLoop, num_characters
from areal_ray.gateway.prompt_length import PromptTooLong, guessed_tokens
from areal_ray.gateway.prompt_refusals import TOO_LONG, refusal, too_long
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.text_stream import before_stop
from areal_ray.gateway.turn_reader import (
    TurnReader,
    max_calls,
    sampled_so_far,
    shown_tools,
    token_logprobs,
)

_RETRY_S = 1.0
_COUNTED_TOKENS = 1 << 15
_CANCELLED = "the call was cancelled"


class Answers:
    """Answers calls of any session.

    Args:
        template: Of the model that samples.
        reply_format: How it writes its replies.
        sampler: Who samples.
        limits: What a call may ask for.
        seed: The run's; with the session and the turn it gives the seed of each turn.
    """

    def __init__(
        self,
        template: ChatTemplate,
        reply_format: ReplyFormat,
        sampler: TurnSampler,
        *,
        limits: CallLimits,
        seed: int = 0,
    ) -> None:
        self.template = template
        self.reply_format = reply_format
        self.sampler = sampler
        self.limits = limits
        self.seed = seed
        self.off_loop = OffLoop()

    async def begin(self, call: Call, record: SessionRecord) -> "Answer":
        """Fix the prompts of a call; those of long conversations beside the event loop.

        Raises:
            CallError: 400: a message cannot be read, the template refuses the conversation, the
                prompt leaves no room to answer, or too many choices are asked for.
        """
        self.limits.check(call, is_trained=record.is_trained)
        recorder, opened = record.recorder, list[PromptedTurn]()
        try:
            work = partial(self._open, call, recorder, opened)
            turn = await self.off_loop.run(num_characters(call), work)
            room = self._room(len(turn.prompt_ids))
        except (CallError, asyncio.CancelledError) as error:
            record.is_full = isinstance(error, CallError) and error.code == TOO_LONG
            why = PROMPT_FILLS_CONTEXT if record.is_full else _CANCELLED
            for turn in opened:
                with recorder.lock:
                    recorder.abort_turn(turn, None, why)
                record.turn_over(turn.turn_id, "")
            raise
        record.is_full = False
        with recorder.lock:
            others = [recorder.sibling_turn(turn) for _ in range(call.n - 1)]
        return Answer(self, call, record, [turn, *others], room)

    def _open(self, call: Call, recorder: Recorder, opened: list[PromptedTurn]) -> PromptedTurn:
        """A turn of the record, which `opened` gets too."""
        try:
            with recorder.lock:  # other calls of the session may end meanwhile
                turn = recorder.open_turn(
                    in_call_order(call.messages),
                    shown_tools(call),
                    hints=call.hints,
                    is_held=bool(call.grammar),
                    most_tokens=self.limits.context_tokens,
                )
        except PromptTooLong as error:
            raise too_long(error.num_tokens, self.limits.context_tokens) from error
        except ValueError as error:
            raise refusal(self.template, call, error) from error
        opened.append(turn)
        return turn

    async def count_prompt_tokens(self, call: Call) -> int:
        """Tokens of the prompt that a call would have if nothing of it were recorded; of megabytes
        about as many.

        Raises:
            CallError: 400, as of `begin`.
        """
        return await self.off_loop.run(num_characters(call), partial(self._count, call))

    def _count(self, call: Call) -> int:
        try:
            plain = [canonical(said, at) for at, said in enumerate(in_call_order(call.messages))]
            text = self.template.render(plain, shown_tools(call))
            return guessed_tokens(self.template.encode_array, text, _COUNTED_TOKENS)
        except ValueError as error:
            raise refusal(self.template, call, error) from error

    def _room(self, num_prompt_tokens: int) -> int:
        """Tokens that the context leaves."""
        if num_prompt_tokens < self.limits.context_tokens:
            return self.limits.context_tokens - num_prompt_tokens
        raise too_long(num_prompt_tokens, self.limits.context_tokens)


@dataclass(slots=True)
class _Part:
    """One choice of a call on its way."""

    index: int
    turn: PromptedTurn
    request: TurnRequest
    come: list[TurnChunk] = field(default_factory=list)
    """Chunks of a stream so far."""
    is_over: bool = False
    """Whether the record knows how it ended."""


class Answer:
    """One call whose prompts are fixed; sampled once, by `whole` or by `events`."""

    def __init__(
        self,
        answers: Answers,
        call: Call,
        record: SessionRecord,
        turns: Sequence[PromptedTurn],
        room: int,
    ) -> None:
        self._answers = answers
        self._call = call
        self._record = record
        self.opening = CallOpening(
            secrets.token_hex(16),
            int(time.time()),
            call.model,
            len(turns[0].prompt_ids),
            handle=turns[0].handle,
        )
        limits = answers.limits
        wanted = min(call.max_tokens or limits.max_new_tokens, limits.max_new_tokens, room)
        self._stop = tuple(dict.fromkeys((*limits.stop, *call.stop)))
        self._parts = [
            _Part(index, turn, self._request(turn, index, wanted))
            for index, turn in enumerate(turns)
        ]
        self.reply: CallReply | None = None
        """The whole, once all was sampled."""

    def _request(self, turn: PromptedTurn, index: int, max_new_tokens: int) -> TurnRequest:
        call, record = self._call, self._record
        grammar = call.grammar
        if grammar:
            grammar = self._answers.reply_format.whole_grammar(grammar, turn.prompt_ids)
        is_free = not record.is_trained
        if call.seed is None or record.is_trained:  # siblings must not be alike
            seed = derive_seed(self._answers.seed, record.session_id, turn.turn_id)
        else:
            seed = derive_seed(call.seed, index)
        return TurnRequest(
            request_id=f"{self.opening.id}-{index}",
            prompt_ids=turn.prompt_ids,
            max_new_tokens=max_new_tokens,
            stop=self._stop,
            seed=seed,
            prefix_key=record.prefix_key or record.session_id,
            temperature=call.temperature if is_free else None,
            top_p=call.top_p if is_free else None,
            wishes=call.wishes if is_free else SamplingWishes(),
            grammar=grammar,
            top_logprobs=call.top_logprobs if call.logprobs else 0,
        )

    async def whole(self) -> CallReply:
        """Sample all choices.

        Raises:
            CallError: 503 if the sampler fails, 400 if it refuses what was asked.
        """
        if len(self._parts) == 1:
            return self._replied([await self._sampled(self._parts[0])])
        tasks = [asyncio.create_task(self._sampled(part)) for part in self._parts]
        try:
            return self._replied(await asyncio.gather(*tasks))
        finally:
            await _ended(tasks)

    async def events(self) -> AsyncGenerator[list[CallEvent], None]:
        """What is sampled, as it comes; `reply` is there after the last of it.

        Raises:
            CallError: 503 if the sampler fails, 400 if it refuses what was asked.
        """
        ends: dict[int, Choice] = {}
        source = self._streamed(self._parts[0]) if len(self._parts) == 1 else self._merged()
        async with aclosing(source):
            async for events in source:
                for event in events:
                    if isinstance(event, ChoiceEnd):
                        ends[event.choice] = event.whole
                yield events
        self._replied([ends[index] for index in range(len(self._parts))])

    def abandon(self, reason: str) -> None:
        """End whatever is not over; harmless if all is."""
        for part in self._parts:
            self._abort(part, reason)

    # -- one choice ----------------------------------------------------------------------------

    async def _sampled(self, part: _Part) -> Choice:
        try:
            sampled = await self._answers.sampler.sample(part.request)
        except ArealRayError as error:
            self._abort(part, str(error))
            raise _failed(error) from error
        except asyncio.CancelledError:
            self._abort(part, _CANCELLED)
            raise
        return await self._closed(part, sampled)

    async def _streamed(self, part: _Part) -> AsyncGenerator[list[CallEvent], None]:
        answers = self._answers
        reader = TurnReader(
            answers.template,
            answers.reply_format,
            self._call,
            part.turn,
            part.index,
            stop=self._stop,
        )
        try:
            async with aclosing(answers.sampler.stream(part.request)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, TurnEnd):
                        choice = await self._closed(part, chunk.sampled)
                        yield reader.end(chunk.sampled, choice)
                        return
                    part.come.append(chunk)
                    if events := reader.feed(chunk):
                        yield events
        except ArealRayError as error:
            self._abort(part, str(error))
            raise _failed(error) from error
        finally:
            self._abort(part, _CANCELLED)

    async def _merged(self) -> AsyncGenerator[list[CallEvent], None]:
        """The events of all choices, in the order they come."""
        come: asyncio.Queue[list[CallEvent] | CallError | None] = asyncio.Queue()

        async def pump(part: _Part) -> None:
            try:
                async with aclosing(self._streamed(part)) as source:
                    async for events in source:
                        come.put_nowait(events)
            except CallError as error:
                come.put_nowait(error)
            else:
                come.put_nowait(None)

        tasks = [asyncio.create_task(pump(part)) for part in self._parts]
        try:
            num_running = len(tasks)
            while num_running:
                events = await come.get()
                if isinstance(events, CallError):
                    raise events
                if events is None:
                    num_running -= 1
                else:
                    yield events
        finally:
            await _ended(tasks)

    async def _closed(self, part: _Part, sampled: SampledTurn) -> Choice:
        part.is_over = True

        def read() -> Choice:
            with self._record.recorder.lock:
                reply = self._record.recorder.close_turn(part.turn, sampled, self._stop)
            return self._choice(part, sampled, reply)

        size = OF_A_TOKEN * len(sampled.token_ids)
        try:
            choice = await self._answers.off_loop.run(size, read)
        except asyncio.CancelledError:  # it was read to its end all the same
            self._record.turn_over(part.turn.turn_id, self.opening.id)
            raise
        self._record.turn_over(part.turn.turn_id, self.opening.id)
        return choice

    def _abort(self, part: _Part, reason: str) -> None:
        if not part.is_over:
            part.is_over = True
            recorder, so_far = self._record.recorder, sampled_so_far(part.come)
            with recorder.lock:
                recorder.abort_turn(part.turn, so_far, reason)
            self._record.turn_over(part.turn.turn_id, self.opening.id)

    def _choice(self, part: _Part, sampled: SampledTurn, reply: Reply) -> Choice:
        answers, call = self._answers, self._call
        ids: list[int] = sampled.token_ids.tolist()
        told = reply.tool_calls[: max_calls(call)]
        reason = sampled.stop_reason
        stop_text = ""
        if self._stop and reason is StopReason.STOP:
            _, stop_text = before_stop(answers.reply_format.decode(ids), self._stop)
        num_reasoning = 0
        if reply.reasoning:
            num_reasoning = answers.reply_format.count_reasoning_tokens(ids, part.turn.prompt_ids)
        return Choice(
            text=reply.text,
            reasoning=reply.reasoning,
            tool_calls=tuple(CalledTool(one.id, one.name, one.arguments) for one in told),
            stop_reason=StopReason.TOOL_CALLS if told and reason is StopReason.STOP else reason,
            stop_text=stop_text,
            handle=part.turn.handle,
            logprobs=tuple(token_logprobs(answers.template, sampled)) if call.logprobs else (),
            num_tokens=len(ids),
            num_reasoning_tokens=num_reasoning,
        )

    def _replied(self, choices: Sequence[Choice]) -> CallReply:
        opening = self.opening
        self.reply = CallReply(
            opening.id,
            opening.created_s,
            opening.model,
            tuple(choices),
            opening.num_prompt_tokens,
            opening.num_cached_tokens,
        )
        return self.reply


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failed(error: ArealRayError) -> CallError:
    if isinstance(error, RequestRefused):
        return CallError(400, "invalid_value", f"sampling: {error}")
    return CallError(503, "engine_error", f"sampling: {error}", retry_after_s=_RETRY_S)
