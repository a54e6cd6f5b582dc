"""Turns held to grammars: what they may be, and what others notice of it."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_ray.core.grammars import Grammars, Matcher
from areal_ray.core.trajectory import StopReason
from areal_ray.engines.sampling import SamplingRows, sample
from areal_ray.gateway.grammar_text import GrammarText, nested
from tests.support.generation import Served, random_prompt, request, serving
from tests.support.tiny_models import tiny_tokenizer, write_tiny_model

NINE = range(9)
ENOUGH = 400
"""Tokens in which the schemas below can be kept whatever is drawn."""


def grammar_of(schema: dict[str, Any]) -> str:
    """As the gateway writes it for a schema."""
    text = GrammarText(lambda _: None)
    return "start: reply\n" + text.written(text.json(schema))


def slow_grammar(name: str) -> str:
    """One that takes about a second to compile."""
    keys = {f"{name}{i}": {"type": "string"} for i in range(2000)}
    return grammar_of({"type": "object", "properties": keys, "required": list(keys)})


def made() -> Grammars:
    """Of the tiny tokenizer."""
    tokenizer = tiny_tokenizer()
    return Grammars(tokenizer.backend_tokenizer.to_str, 0, [tokenizer.eos_token_id])


def follows(matcher: Matcher, text: str) -> bool:
    """Whether a whole text is what the grammar allows."""
    matcher = matcher.copy()
    for token in tiny_tokenizer().encode(text):
        if not matcher.mask[token // 32] >> (token % 32) & 1:
            return False
        matcher.take(token)
    return matcher.is_complete


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_model(tmp_path_factory.mktemp("grammars"), seed=3)
    with serving(folder, max_slots=16) as made:
        yield made


_LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"enum": ["red", 7, None]},
        {"const": {"k": [1, "x"]}},
        {"anyOf": [{"type": "boolean"}, {"enum": ["a b", 'quo"te']}]},
    ]
)
_KEYS = st.lists(
    st.sampled_from(["a", "b c", 'q"', "\u00fc", "$ref", "name"]), unique=True, max_size=3
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def of(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.builds(
            lambda schemas, needed: {
                "type": "object",
                "properties": dict(zip(keys, schemas, strict=True)),
                "required": [key for key, is_needed in zip(keys, needed, strict=True) if is_needed],
                "additionalProperties": False,
            },
            st.tuples(*[inner] * len(keys)),
            st.tuples(*[st.booleans()] * len(keys)),
        )

    return _KEYS.flatmap(of)


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner)
        | _objects(inner)
    ),
    max_leaves=4,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=_SCHEMAS, seed=st.integers(0, 2**20))
def test_whatever_a_model_samples_under_a_schema_is_json_of_it(served, schema, seed):
    name, grammar = f"{len(served.results)}", grammar_of(schema)
    turns = [
        replace(
            request(f"{name}-{i}", random_prompt(seed, 6), seed=seed + i, max_new_tokens=ENOUGH),
            grammar=grammar,
        )
        for i in range(3)
    ]
    for result in served.run(turns):
        assert result.error == ""
        assert result.stop_reason is StopReason.STOP
        text = tiny_tokenizer().decode(result.token_ids, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), schema)
        assert np.isfinite(result.logprobs).all()


def test_turns_without_a_grammar_are_what_they_are_alone(served):
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0.0}]
    plain = [
        request(f"plain-{i}", random_prompt(i, 9), seed=i, max_new_tokens=60, **way)
        for i, way in enumerate(ways)
    ]
    grammar = grammar_of({"type": "array", "items": {"enum": [1, 2]}, "minItems": 15})
    held = [
        replace(
            request(f"held-{i}", random_prompt(i, 9), seed=i, max_new_tokens=60), grammar=grammar
        )
        for i in range(4)
    ]
    alone = served.run(plain)
    renamed = [replace(turn, request_id=f"{turn.request_id}-among") for turn in plain]
    among = served.run([turn for pair in zip(held, renamed, strict=True) for turn in pair])[1::2]
    for one, other in zip(alone, among, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)  # of other matmuls


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_beside_an_adjusted_one_are_recorded_to_the_last_bit_as_without_it(temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 4
    uniform = torch.tensor([0.2, 0.5, 0.9])

    def rows(is_adjusted: list[bool]) -> SamplingRows:
        off = np.zeros(3, np.float32)
        hot = np.array([1.0, temperature, 1.0], np.float32)
        ways = (
            hot,
            off + 1,
            off.astype(np.int64),
            off,
            np.array(is_adjusted),
            off.astype(np.int64),
        )
        return SamplingRows.of(*ways, torch.device("cpu"))

    tokens, logprobs = sample(logits, rows([False] * 3), uniform)
    forced = torch.full((1, 50), float("-inf"))
    forced[0, 7] = 0.0
    others, other_logprobs = sample(logits, rows([False, False, True]), uniform, forced)
    assert torch.equal(tokens[:2], others[:2])
    assert torch.equal(logprobs[:2], other_logprobs[:2])
    assert others[2] == 7
    assert other_logprobs[2] == pytest.approx(float(logits[2].log_softmax(0)[7]))


def test_a_seed_fixes_a_held_turn_whatever_else_is_in_the_batch(served):
    grammar = grammar_of({"type": "string", "maxLength": 30})
    turn = replace(request("once", random_prompt(1, 5), seed=5), grammar=grammar)
    (alone,) = served.run([turn])
    crowd = [request(f"crowd-{i}", random_prompt(i, 7), seed=i) for i in range(6)]
    among = served.run([*crowd, replace(turn, request_id="again")])[-1]
    np.testing.assert_array_equal(alone.token_ids, among.token_ids)


def test_other_turns_go_on_while_a_large_schema_is_compiled(served):
    grammar = slow_grammar("p")
    held = replace(request("large", random_prompt(0, 4), max_new_tokens=2), grammar=grammar)
    others = [
        request(f"beside-{i}", random_prompt(i, 4), seed=i, max_new_tokens=20) for i in range(4)
    ]
    served.engine.submit([held, *others])
    served.wait(*(turn.request_id for turn in others))
    assert "large" not in served.results
    assert served.wait("large")[0].error == ""


def test_a_grammar_that_cannot_follow_its_turn_ends_that_with_the_reason_and_no_other(served):
    keys = {f"k{i}": {"type": "string"} for i in range(1500)}  # each may come next after the first
    grammar = grammar_of({"type": "object", "properties": keys})
    held = replace(request("lost", random_prompt(0, 4)), grammar=grammar)
    lost, other = served.run([held, request("kept", random_prompt(1, 4), max_new_tokens=30)])
    assert "items" in lost.error
    assert lost.is_refused
    assert other.error == ""


def test_a_turn_is_given_up_while_its_grammar_is_compiled(served):
    grammar = slow_grammar("g")
    held = replace(request("given-up", random_prompt(0, 4)), grammar=grammar)
    served.engine.submit([held])
    assert served.engine.health().num_waiting == 1
    served.engine.abort(["given-up"])
    (result,) = served.wait("given-up")
    assert (result.stop_reason, result.error, len(result.token_ids)) == (StopReason.ABORT, "", 0)


def test_closing_hands_back_a_turn_whose_grammar_is_being_compiled(tmp_path: Path) -> None:
    grammar = slow_grammar("c")
    with serving(write_tiny_model(tmp_path)) as one:
        one.engine.submit([replace(request("late", [5]), grammar=grammar)])
    assert one.wait("late")[0].stop_reason is StopReason.ABORT


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "no-such"}, "no-such"),
        ({"$ref": "http://127.0.0.1:9/x"}, "127.0.0.1:9"),
        ({"$ref": "#"}, "text"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
        ({"type": "string", "pattern": "(?=a)"}, "look"),
        ({"properties": {f"p{i}": {"type": "null"} for i in range(9000)}}, "grammar size"),
        ({"enum": [f"word {i}" for i in range(40_000)]}, "characters"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 10**6, "maxItems": 10**6}, ""),
        ({"type": "string", "minLength": 10**9}, ""),
        ({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}, ""),
        (
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(6)]} for i in range(9)]},
            "",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_kept_is_told_in_seconds_and_a_hard_one_never_stalls(schema, told):
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.005):
            ticks.append(time.monotonic())

    beside = threading.Thread(target=tick)
    beside.start()
    begin = time.monotonic()
    found = made().compile(grammar_of(schema))
    took_s = time.monotonic() - begin
    over.set()
    beside.join()
    assert took_s < 15
    assert max(np.diff([begin, *ticks]), default=0.0) < 2.0
    if told:
        assert isinstance(found, str)
        assert told in found
        assert "\n" not in found


def test_a_grammar_is_compiled_once_and_each_turn_goes_its_own_way():
    grammars, grammar = made(), grammar_of({"enum": ["ab", "cd"]})
    assert grammars.begin(grammar) is None
    first = grammars.compile(grammar)
    assert isinstance(first, Matcher)
    first.take(tiny_tokenizer().encode('"')[0])
    second = grammars.begin(grammar)
    assert isinstance(second, Matcher)
    assert follows(second, '"ab"')
    assert not follows(second, "ab")


def test_json_has_blanks_only_where_they_are_usual():
    (matcher,) = [made().compile(grammar_of({"type": "object"}))]
    assert isinstance(matcher, Matcher)
    assert follows(matcher, '{"a": 1, "b":[1,2]}')
    assert not follows(matcher, '{"a":  1}')
    assert not follows(matcher, '{ "a": 1}')
    assert not follows(matcher, '{"a": 1} ')


def test_what_a_client_says_of_the_grammar_itself_holds_nothing():
    schema = {"enum": [1], "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    matcher = made().compile(grammar_of({**schema, "uniqueItems": True}))
    assert isinstance(matcher, str)


def test_references_of_a_nested_schema_go_where_it_went():
    tree = {
        "$id": "http://x/y",
        "properties": {"child": {"$ref": "#"}, "n": {"$ref": "#/$defs/n"}, "$ref": {"enum": [1]}},
        "$defs": {"n": {"type": "null"}},
    }
    moved = nested(tree, "#/$defs/t")
    assert moved["properties"]["child"] == {"$ref": "#/$defs/t"}
    assert moved["properties"]["n"] == {"$ref": "#/$defs/t/$defs/n"}
    assert moved["properties"]["$ref"] == {"enum": [1]}
    assert "$id" not in moved
