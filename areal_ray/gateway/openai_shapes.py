"""What the dialects of OpenAI's write alike."""

from collections.abc import Sequence
from typing import Any

from areal_ray.gateway.call import CallError, CallReply, TokenLogprob

DONE = b"data: [DONE]\n\n"
"""Ends a stream of Chat Completions or Completions."""

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def openai_error(error: CallError) -> dict[str, Any]:
    """The body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, kind),
            "param": error.param or None,
            "code": error.code,
        }
    }


def shown_logprob(token: TokenLogprob) -> float:
    """A log-prob that JSON can hold."""
    return max(token.logprob, _LEAST_LOGPROB)


def shown_logprobs(logprobs: Sequence[TokenLogprob], *, top: int) -> list[dict[str, Any]]:
    """Sampled tokens with their log-probs, and with `top` others likeliest tokens in their place; a
    sampled one stands for these where its engine tells none."""
    return [
        {
            **_shown_token(token),
            "top_logprobs": [_shown_token(one) for one in token.top or (token,)] if top else [],
        }
        for token in logprobs
    ]


def _shown_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": shown_logprob(token), "bytes": list(token.raw)}


def chat_usage(reply: CallReply) -> dict[str, Any]:
    """The `usage` of Chat Completions and Completions."""
    sampled = reply.num_tokens
    reasoning = sum(choice.num_reasoning_tokens for choice in reply.choices)
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": reply.num_prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning, "audio_tokens": 0},
    }
