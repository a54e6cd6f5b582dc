"""Between our turns and vLLM's requests: sampling parameters there, tokens and versions back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens, joined_tops
from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.engines.row_table import failed_result

_LARGEST_SEED = 2**63 - 1
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_NOT_FINITE = (
    "token {} has a log-prob that is not finite; the training step that made version {} of the "
    "weights diverged. Lower the learning rate or resume from an earlier checkpoint."
)


@dataclass(slots=True)
class Turn:
    """A request that is being served."""

    request: GenerationRequest
    is_streamed: bool
    internal_id: str = ""
    """vLLM's own name for it; empty until it is handed over."""
    state: Any = None
    """What vLLM's output processor holds of it."""
    is_aborted: bool = False
    begins_anew: bool = False
    """The weights changed before its first token: it is handed over again."""
    is_broken: bool = False
    """It has a log-prob that is not finite."""
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    """What was told so far, piece by piece."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    tops: list[TopTokens | None] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        """Tokens that vLLM has told of."""
        return 0 if self.state is None else int(self.state.detokenizer.num_output_tokens())

    def take(self, completion: Any) -> GenerationChunk | None:
        """Keep what a completion tells anew, and hand it on; None where that is nothing."""
        count = len(completion.token_ids)
        if count == 0:
            return None
        first = sum(map(len, self.token_ids))
        token_ids = np.asarray(completion.token_ids, dtype=np.int32)
        logprobs = _sampled_logprobs(completion.logprobs)
        assert len(logprobs) == count, "vLLM told another number of log-probs than of tokens"
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        wanted = self.request.top_logprobs
        top = top_tokens(completion.logprobs, wanted) if wanted else None
        self.tops.append(top)
        self.is_broken |= not np.isfinite(logprobs).all()
        versions = _token_versions(self._version_starts(completion), first, first + count)
        return GenerationChunk(self.request.request_id, token_ids, logprobs, versions, top)

    def result(self, completion: Any) -> GenerationResult:
        """The turn that ended with this completion, whole."""
        name, reason = self.request.request_id, completion.finish_reason
        token_ids = np.concatenate([np.empty(0, np.int32), *self.token_ids])
        logprobs = np.concatenate([np.empty(0, np.float32), *self.logprobs])
        versions = _token_versions(self._version_starts(completion), 0, len(token_ids))
        if (versions < 0).any():
            return failed_result(name, "vLLM told no version of the weights for its tokens.")
        broken = np.flatnonzero(~np.isfinite(logprobs))
        if len(broken):
            return failed_result(name, _NOT_FINITE.format(broken[0], versions[broken[0]]))
        if reason not in _REASONS:
            return failed_result(name, f"vLLM ended it with {reason!r}.")
        top = joined_tops(self.tops)
        return GenerationResult(name, token_ids, logprobs, versions, _REASONS[reason], top=top)

    def _version_starts(self, completion: Any) -> list[tuple[str, int]]:
        """Versions with their first tokens: of a last completion its spans, else as tracked."""
        if completion.weight_versions is not None:
            return [(span.version, span.start) for span in completion.weight_versions]
        return [] if self.state is None else self.state.weight_version_starts


def sampling_params(turn: Turn, stop_ids: Sequence[int], window_tokens: int) -> SamplingParams:
    """How vLLM is to sample a turn."""
    request, sampling = turn.request, turn.request.sampling
    bias = {int(key): value for key, value in sampling.logit_bias.items()}
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=bias or None,
        max_tokens=min(sampling.max_new_tokens, window_tokens - len(request.prompt_ids)),
        stop=list(sampling.stop) or None,
        stop_token_ids=sorted({*stop_ids, *sampling.stop_token_ids}),
        ignore_eos=True,  # the ids that end a turn are given above
        seed=request.seed & _LARGEST_SEED,
        structured_outputs=_held_to(request.grammar) if request.grammar else None,
        logprobs=request.top_logprobs,  # beside the sampled one's
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=(RequestOutputKind.DELTA if turn.is_streamed else RequestOutputKind.FINAL_ONLY),
    )


def _held_to(grammar: str) -> StructuredOutputsParams:
    # vLLM takes two syntaxes; the declaration says that it is llguidance's.
    return StructuredOutputsParams(grammar=f"%llguidance {{}}\n{grammar}")


def scoring_params(last: int) -> SamplingParams:
    """How vLLM is to tell the log-prob of each token of a prompt, and of one after it."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=[last],  # which leaves the log-prob that is told as it is
        logprobs=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scored_logprobs(output: Any, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """[T-1] of what came back for `scoring_params` and the first T-1 of these tokens [T]."""
    logprobs, completion = output.prompt_logprobs, output.outputs[0]
    first = np.asarray(logprobs.start_indices[1:], dtype=np.int64)  # the first has no entry
    told = [*np.asarray(logprobs.token_ids, dtype=np.int64)[first], *completion.token_ids]
    assert told == token_ids[1:].tolist(), "vLLM told other tokens than those asked for"
    before = np.asarray(logprobs.logprobs, dtype=np.float32)[first]
    return np.concatenate([before, _sampled_logprobs(completion.logprobs)])


def _sampled_logprobs(logprobs: Any) -> NDArray[np.float32]:
    """Of each position the sampled token's, which vLLM tells first."""
    first = np.asarray(logprobs.start_indices, dtype=np.int64)
    return np.asarray(logprobs.logprobs, dtype=np.float32)[first]


def top_tokens(logprobs: Any, count: int) -> TopTokens:
    """The `count` likeliest of each position, by rank.

    Behind the sampled token, whatever was sampled; but where vLLM joined what it had told nobody
    yet, a sampled token that is among them is there but once, in front.
    """
    places = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        if end - start > count:
            places.append(np.arange(end - count, end))
        else:
            ranks = np.asarray(logprobs.ranks[start:end], dtype=np.int64)
            places.append(start + np.argsort(ranks, kind="stable"))
    at = np.stack(places)
    ids = np.asarray(logprobs.token_ids, dtype=np.int32)[at]
    return TopTokens(ids, np.asarray(logprobs.logprobs, dtype=np.float32)[at])


def _token_versions(starts: Sequence[tuple[str, int]], first: int, end: int) -> NDArray[np.int32]:
    """Version of each of the tokens first..end-1; -1 where none is told."""
    versions = np.full(end - first, -1, np.int32)
    for label, start in starts:
        versions[max(start - first, 0) :] = int(label)
    return versions
