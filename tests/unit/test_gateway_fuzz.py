"""Bodies that no client would send: refused or answered, never a defect, and no turn left open."""

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_ray.gateway.limits import EdgeLimits
from tests.support.gateway import TOOL, Gateway, ask, make_gateway
from tests.support.scripted_sampler import Said

CALL = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 plus 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call1", "name": "add", "content": "2"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "max_tokens": 5,
    "max_completion_tokens": 6,
    "n": 1,
    "seed": 3,
    "stop": ["end"],
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "parallel_tool_calls": True,
    "user": "u",
}
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63), 10**400, 1e308, -0.0, "\ud800", "\x00", "\uffff" * 9])
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
LIMITS = EdgeLimits(body_bytes=20_000, num_items=50, depth=20)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a value."""
    named = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for name, inner in named:
        found.append((*path, name))
        if isinstance(inner, dict | list):
            found += places(inner, (*path, name))
    return found


def changed(path: tuple[Any, ...], odd: Any, *, is_gone: bool) -> dict[str, Any]:
    """The body with something else in one place, or nothing."""
    body = json.loads(json.dumps(BODY))
    at = body
    for name in path[:-1]:
        at = at[name]
    if is_gone:
        del at[path[-1]]
    else:
        at[path[-1]] = odd
    return body


def answered(body: bytes, gateway: Gateway | None = None) -> int:
    """The status; fails if anything of the call is left."""
    gateway = gateway or make_gateway([Said("two")], edge=LIMITS)
    status, content = asyncio.run(ask(gateway, body))
    counts = gateway.service.counts
    assert counts.num_defects == counts.num_failed == 0, content
    assert counts.num_open == gateway.door.num_inside == gateway.sampler.num_running == 0
    assert gateway.recorder.num_turns == len(gateway.sampler.requests)
    assert status in (200, 400, 413)
    if status != 200:
        assert not gateway.sampler.requests
        assert content["error"]["message"]
    return status


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(places(BODY)), ODD, st.booleans())
def test_a_body_with_one_thing_wrong_is_answered_or_refused_and_leaves_nothing(path, odd, is_gone):
    answered(json.dumps(changed(path, odd, is_gone=is_gone)).encode())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*BODY]), ODD), st.binary(max_size=9), st.integers(0, 400))
def test_bodies_of_odd_fields_and_broken_bytes_are_answered_or_refused(fields, broken, place):
    answered(json.dumps({**BODY, **fields}).encode())
    text = json.dumps(BODY).encode()
    answered(text[:place] + broken + text[place + len(broken) :])


def test_fields_that_stand_twice_numbers_beyond_all_bounds_and_depth_are_no_defect():
    text = json.dumps(BODY)
    for body in (
        text[:-1] + ', "messages": []}',
        '{"messages": [], ' + text[1:],
        text.replace('"seed": 3', '"seed": ' + "9" * 4000),
        text.replace('"seed": 3', '"seed": ' + "9" * 5000),
        text.replace('"temperature": 1.0', '"temperature": 1e999'),
        text.replace('"temperature": 1.0', '"temperature": NaN'),
        text.replace('"u"', '"\\ud800"'),
        text.replace('"u"', "[" * 5000 + "]" * 5000),
        text.replace('"u"', "[" * 19 + "]" * 19),
        text.replace('"u"', '"' + "x" * 20_000 + '"'),
    ):
        answered(body.encode())
