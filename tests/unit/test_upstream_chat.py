"""What a provider in place of the policy is told of a call, whatever dialect it came in."""

from typing import Any

import pytest

from areal_ray.gateway.anthropic import AnthropicMessages
from areal_ray.gateway.call import CallHints
from areal_ray.gateway.openai_chat import OpenAIChat
from areal_ray.gateway.openai_responses import OpenAIResponses
from areal_ray.gateway.upstream_chat import Gathered, chat_body

MESSAGES = [{"role": "user", "content": "17+25?"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA, "strict": True}
GIVEN = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"17": 3.0},
    "seed": 7,
    "min_tokens": 5,
    "reasoning_effort": "low",
    "verbosity": "high",
    "chat_template_kwargs": {"enable_thinking": False},
}
PRIVATE = {"user": "ada", "metadata": {"a": "b"}, "store": True, "service_tier": "priority"}


def told(dialect: Any, body: dict[str, Any], **options: str) -> dict[str, Any]:
    """What a provider is told, but for what every request says."""
    sent = chat_body(dialect.read(body, CallHints()), "big-1", **options)
    assert sent["model"] == "big-1"
    return {name: sent[name] for name in sent if name not in ("model", "messages", "stream")}


def test_what_a_client_wishes_reaches_the_provider_and_what_names_its_users_does_not():
    sent = told(OpenAIChat(), {"messages": MESSAGES, **GIVEN, **PRIVATE, "unheard_of": 1})
    assert sent == {**GIVEN, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (OpenAIResponses(), {"input": "x", "reasoning": {"effort": "low"}, "top_k": 40}),
        (
            AnthropicMessages(),
            {"messages": MESSAGES, "output_config": {"effort": "low"}, "top_k": 40},
        ),
    ],
)
def test_other_dialects_have_their_own_places_for_the_same(dialect, body):
    sent = told(dialect, body)
    assert (sent["reasoning_effort"], sent["top_k"]) == ("low", 40)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_is_called_as_the_provider_calls_it(name):
    for given in ("max_tokens", "max_completion_tokens"):
        sent = told(OpenAIChat(), {"messages": MESSAGES, given: 9}, limit_field=name)
        assert [key for key in sent if key.startswith("max_")] == [name]
        assert sent[name] == 9


def test_what_has_to_be_kept_strictly_is_asked_for_so():
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    tools = [{"type": "function", "function": one} for one in (FUNCTION, {"name": "loose"})]
    sent = told(OpenAIChat(), {"messages": MESSAGES, "response_format": wanted, "tools": tools})
    assert sent["response_format"]["json_schema"]["strict"] is True
    assert [tool["function"].get("strict") for tool in sent["tools"]] == [True, None]
    del wanted["json_schema"]["strict"]
    sent = told(OpenAIChat(), {"messages": MESSAGES, "response_format": wanted})
    assert "strict" not in sent["response_format"]["json_schema"]


def with_logprob(logprob: Any) -> Gathered:
    """A choice of which one token has come."""
    found = Gathered(0, wants_logprobs=True)
    told = {"token": "a", "bytes": [97], "logprob": logprob}
    found.feed({"delta": {"content": "a"}, "logprobs": {"content": [told]}})
    return found


@pytest.mark.parametrize("logprob", [float("-inf"), -(10**400), -20000.0])
def test_a_token_that_cannot_come_has_a_logprob_that_json_can_hold(logprob):
    assert [token.logprob for token in with_logprob(logprob).logprobs] == [-9999.0]


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), 10**400, "-1", True, None])
def test_a_logprob_that_is_none_is_the_provider_s_fault(logprob):
    with pytest.raises(ValueError, match="no log-prob"):
        with_logprob(logprob)
