"""Bodies that no client would send: refused or answered, never a defect, and no record harmed."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.turn_record import decode_turn, encode_turn
from tests.support.gateway import Answered, Gateway, ask, make_gateway
from tests.support.request_bodies import DIALECTS, Spoken, copied
from tests.support.scripted_sampler import Said
from tests.support.sdk_clients import SHOWS_ALL
from tests.support.tiny_models import tiny_tokenizer

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63), 10**400, 1e308, -0.0, "", "\ud800", "\x00", "\uffff" * 9])
    | st.sampled_from(["user", "assistant", "tool", "text", "image", "tool_use", "reasoning", "[{"])
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id", "name", "input"])
            | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
LIMITS = EdgeLimits(body_bytes=20_000, num_items=50, depth=20)
CALL = '<tool_call>{"name": "add", "arguments": {"a" :  1}}</tool_call>'
READS_SCHEMAS = SHOWS_ALL.replace(
    "{{ tools | tojson if tools else '' }}",
    "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k }}: {{ v.type }}"
    "{% endfor %}{% endfor %}",
)
"""As some templates do, which take schemas to be as schemas are."""
TOKENIZER = tiny_tokenizer()
ODDITIES = settings(max_examples=110, suppress_health_check=[HealthCheck.too_slow])
every_dialect = pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a value."""
    named = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for name, inner in named:
        found.append((*path, name))
        if isinstance(inner, dict | list):
            found += places(inner, (*path, name))
    return found


def change(body: Any, path: tuple[Any, ...], how: str, odd: Any) -> None:
    """Make something of what lies at a path: another value, nothing, two, or deep below others."""
    for name in path[:-1]:
        body = body[name]
    name = path[-1]
    if how == "gone":
        del body[name]
    elif how == "twice" and isinstance(body, list):
        body.insert(name, copied(body[name]))
    elif how == "turned" and isinstance(body[name], list):
        body[name].reverse()
    elif how == "deep":
        for _ in range(12):
            body[name] = [body[name]]
    elif how == "more" and isinstance(body[name], dict):
        body[name][str(odd)[:9]] = odd
    else:
        body[name] = odd


@st.composite
def oddities(draw: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A body with up to three things changed."""
    changed = copied(body)
    for _ in range(draw(st.integers(1, 3))):
        where = places(changed)
        if where:
            hows = st.sampled_from(["odd", "odd", "gone", "twice", "turned", "deep", "more"])
            change(changed, draw(st.sampled_from(where)), draw(hows), draw(ODD))
    return changed


def answered(
    spoken: Spoken, body: bytes, gateway: Gateway | None = None, path: str = ""
) -> Answered:
    """The answer; fails if it is a defect or no answer of the dialect's, or leaves anything."""
    gateway = gateway or make_gateway(
        [Said(f"two{CALL}")], tokenizer=TOKENIZER, edge=LIMITS, chat_template=SHOWS_ALL
    )
    earlier = len(gateway.sampler.requests)
    answer = asyncio.run(ask(gateway, body, path=path or spoken.path))
    counts = gateway.service.counts
    assert counts.num_defects == counts.num_failed == 0, answer
    assert counts.num_open == gateway.door.num_inside == gateway.sampler.num_running == 0
    assert answer.status in (200, 400, 413)
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    assert is_stream or answer.headers["content-type"] == "application/json"
    if answer.status == 200:
        assert answer.events() if is_stream else answer.json()
    else:
        assert not is_stream
        assert len(gateway.sampler.requests) == earlier
        spoken.error(answer.json())
    return answer


@every_dialect
@ODDITIES
@given(data=st.data())
def test_a_body_with_things_wrong_is_answered_or_refused_in_the_dialects_shape(spoken, data):
    answered(spoken, json.dumps(data.draw(oddities(spoken.body))).encode())


@every_dialect
@settings(max_examples=40)
@given(data=st.data(), broken=st.binary(max_size=9), place=st.integers(0, 400))
def test_bodies_of_odd_fields_and_broken_bytes_are_answered_or_refused(spoken, data, broken, place):
    fields = data.draw(st.dictionaries(st.sampled_from([*spoken.body]), ODD))
    answered(spoken, json.dumps({**spoken.body, **fields}).encode())
    text = json.dumps(spoken.body).encode()
    answered(spoken, text[:place] + broken + text[place + len(broken) :])


@every_dialect
def test_fields_that_stand_twice_numbers_beyond_all_bounds_and_depth_are_no_defect(spoken):
    text = json.dumps(spoken.body)
    model = '"model": "m"'
    assert model in text
    for body in (
        text[:-1] + f', "{spoken.history}": []}}',
        f'{{"{spoken.history}": [], ' + text[1:],
        text.replace(model, '"seed": ' + "9" * 4000),
        text.replace(model, '"seed": ' + "9" * 5000),
        text.replace('"temperature": 1.0', '"temperature": 1e999'),
        text.replace('"temperature": 1.0', '"temperature": NaN'),
        text.replace(model, '"metadata": {"a": 1e999}'),
        text.replace(model, '"model": "\\ud800"'),
        text.replace(model, '"model": "\\u0000"'),
        text.replace(model, '"model": ' + "[" * 5000 + "]" * 5000),
        text.replace(model, '"metadata": ' + "[" * 19 + "]" * 19),
        text.replace(model, '"metadata": ' + "[" * 20 + "]" * 20),
        text.replace(model, '"model": "' + "x" * 20_000 + '"'),
    ):
        answered(spoken, body.encode())


@every_dialect
@settings(max_examples=40)
@given(data=st.data())
def test_a_schema_that_a_template_cannot_read_is_refused_and_no_defect(spoken, data):
    gateway = make_gateway([Said("two")], tokenizer=TOKENIZER, chat_template=READS_SCHEMAS)
    answered(spoken, json.dumps(spoken.start).encode(), gateway)
    tools = copied(spoken.start["tools"])
    path = data.draw(st.sampled_from(places(tools)[1:]))
    change(tools, path, data.draw(st.sampled_from(["odd", "gone"])), data.draw(ODD))
    answered(spoken, json.dumps({**spoken.start, "tools": tools}).encode(), gateway)


@every_dialect
@settings(max_examples=40)
@given(data=st.data())
def test_odd_calls_between_the_turns_of_an_agent_leave_its_line_as_it_was(spoken, data):
    """And whatever they left in the record can be written down and taken up again."""
    gateway = make_gateway(
        [Said(f"two{CALL}")], tokenizer=TOKENIZER, edge=LIMITS, chat_template=SHOWS_ALL
    )
    body = spoken.start
    line: list[int] = []
    for _ in range(3):
        answer = answered(spoken, json.dumps(body).encode(), gateway)
        assert answer.status == 200, answer
        request = gateway.sampler.requests[-1]
        assert request.prompt_ids.tolist()[: len(line)] == line
        sampled = gateway.sampler.sampled[request.request_id].token_ids.tolist()
        line = [*request.prompt_ids.tolist(), *sampled]
        body = spoken.next(body, answer)
        other = data.draw(st.sampled_from([spoken, *DIALECTS.values()]))
        odd = data.draw(oddities(data.draw(st.sampled_from([other.body, other.start]))))
        answered(other, json.dumps(odd).encode(), gateway)
    recorder = gateway.recorder
    assert recorder.num_turns == len(gateway.sampler.requests)
    names = {"task_id": "t", "group_id": "g", "episode_id": "e"}
    trained = recorder.trajectories(**names)
    assert line in [one.token_ids.tolist() for one in trained]
    again = type(recorder)(recorder._template, recorder._policy, recorder._reader)
    for record in recorder.turn_records():
        again.replay(decode_turn(encode_turn(record)))
    assert [one.token_ids.tolist() for one in again.trajectories(**names)] == [
        one.token_ids.tolist() for one in trained
    ]


@every_dialect
@settings(max_examples=25)
@given(data=st.data())
def test_counting_the_tokens_of_odd_bodies_is_no_defect_either(spoken, data):
    path = {"/v1/responses": "/v1/responses/input_tokens", "/v1/messages": "/messages/count_tokens"}
    if spoken.path in path:
        odd = data.draw(oddities(spoken.body))
        answered(spoken, json.dumps(odd).encode(), path=path[spoken.path])
