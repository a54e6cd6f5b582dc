"""A stand-in for the rollout fleet: samples what a script says, through a real tokenizer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens, TurnEnd, TurnRequest
from areal_ray.errors import ArealRayError
from tests.support.templates import ScriptedTurn


@dataclass(frozen=True)
class Said:
    """One scripted turn."""

    text: str = ""
    """Encoded with its special tokens; the end of turn is added where the turn stops."""
    chunk_tokens: int = 1
    pause_s: float = 0.0
    """Before the first chunk, and before each further one."""
    error: str = ""
    """What the turn fails with, after what was said."""
    hangs: bool = False
    """Never ends, after what was said."""
    version: int = 0
    ids: Sequence[int] | None = None
    """In place of `text`."""
    is_stopped: bool = True
    """Whether the end of turn is sampled."""
    likely: Sequence[Sequence[tuple[int, float]]] | None = None
    """For each token the likeliest in its place with their log-probs, as many as anybody asks."""


@dataclass
class ScriptedSampler:
    """Gives the turns of a script in the order they are asked for, the last one for ever.

    A stop string ends a turn as engines end it: with the token that completes it, which is kept.
    """

    tokenizer: Any
    script: Sequence[Said] | Callable[[TurnRequest], Said]
    requests: list[TurnRequest] = field(default_factory=list)
    sampled: dict[str, ScriptedTurn] = field(default_factory=dict)
    """What was sampled to the end, by request: the engine's own log."""
    num_running: int = 0
    aborted: list[str] = field(default_factory=list)
    """Requests that were cancelled or closed before their end."""

    _kept: dict[str, list[int]] = field(default_factory=dict)

    async def sample(self, request: TurnRequest) -> ScriptedTurn:
        """See `TurnSampler`."""
        async for come in self._run(request, is_whole=True):
            if isinstance(come, TurnEnd):
                assert isinstance(come.sampled, ScriptedTurn)
                return come.sampled
        raise AssertionError("a script that has no end")

    def stream(self, request: TurnRequest) -> AsyncGenerator[ScriptedTurn | TurnEnd, None]:
        """See `TurnSampler`."""
        return self._run(request, is_whole=False)

    async def _run(
        self, request: TurnRequest, *, is_whole: bool
    ) -> AsyncGenerator[ScriptedTurn | TurnEnd, None]:
        said = self._said(request)
        self.requests.append(request)
        whole = self._turn(request, said)
        self.num_running += 1
        has_ended = False
        try:
            size = len(whole.token_ids) if is_whole else said.chunk_tokens
            for start in range(0, len(whole.token_ids), max(size, 1)):
                if said.pause_s:
                    await asyncio.sleep(said.pause_s)
                if not is_whole:
                    yield _part(whole, start, start + size)
            if said.hangs:
                await asyncio.Event().wait()
            has_ended = True
            if said.error:
                raise ArealRayError(said.error)
            self.sampled[request.request_id] = whole
            yield TurnEnd(whole)
        finally:
            self.num_running -= 1
            if not has_ended:
                self.aborted.append(request.request_id)

    def _said(self, request: TurnRequest) -> Said:
        if callable(self.script):
            return self.script(request)
        return self.script[min(len(self.requests), len(self.script) - 1)]

    def _turn(self, request: TurnRequest, said: Said) -> ScriptedTurn:
        ids = list(said.ids) if said.ids is not None else self._encoded(said.text)
        reason = StopReason.STOP
        if said.ids is None and said.is_stopped:
            ids.append(self.tokenizer.eos_token_id)
        for length in range(1, len(ids) + 1) if request.stop else ():
            if any(text in self.tokenizer.decode(ids[:length]) for text in request.stop):
                ids = ids[:length]
                break
        if len(ids) > request.max_new_tokens:
            ids, reason = ids[: request.max_new_tokens], StopReason.LENGTH
        turn = ScriptedTurn(ids, version=said.version, stop_reason=reason)
        if said.likely is not None and request.top_logprobs:
            told = np.array(said.likely)[: len(ids), : request.top_logprobs]
            turn.top = TopTokens(told[..., 0].astype(np.int32), told[..., 1].astype(np.float32))
        return turn

    def _encoded(self, text: str) -> list[int]:
        if text not in self._kept:
            self._kept[text] = list(self.tokenizer.encode(text, add_special_tokens=False))
        return [*self._kept[text]]


def _part(whole: ScriptedTurn, start: int, end: int) -> ScriptedTurn:
    part = ScriptedTurn(whole.token_ids[start:end].tolist())
    part.logprobs = np.array(whole.logprobs[start:end])
    part.versions = np.array(whole.versions[start:end])
    part.top = None if whole.top is None else whole.top.part(start, end)
    return part
