"""How YAML and overrides become typed values."""

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from areal_ray.core.config import Config
from areal_ray.core.typed_yaml import all_keys, read_config, untyped_values
from areal_ray.core.yaml_tree import read_override, read_tree, set_at, write_yaml


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Sampling(Config):
    temperature: float = Field(1.0, ge=0.0)
    stop: tuple[str, ...] = ()
    limit: int | None = 5


class Adam(Config):
    kind: Literal["adam"] = "adam"
    lr: float = 1e-3


class Sgd(Config):
    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.0


class Sample(Config):
    name: str = "x"
    steps: int = 1
    bound: int | Literal["unlimited"] = 2
    is_on: bool = False
    where: Path = Path(".")
    colour: Colour = Colour.RED
    label: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    sampling: Sampling = Sampling()
    optimizer: Adam | Sgd = Adam()
    phases: tuple[Sampling, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Sample":
        if self.steps == 13:
            raise ValueError("steps: is 13; must not be 13. Take 12")
        return self


def read(text: str = "", *overrides: str) -> Sample | list[str]:
    tree = read_tree(text, "f.yaml")
    for override in overrides:
        tree = set_at(tree, *read_override(override))
    return read_config(tree, Sample)


def good(text: str = "", *overrides: str) -> Sample:
    result = read(text, *overrides)
    assert isinstance(result, Sample), result
    return result


def bad(text: str = "", *overrides: str) -> list[str]:
    result = read(text, *overrides)
    assert isinstance(result, list), result
    return result


WORDS = ["1E234", "007", "1e3", "on", "12:30:45", "true", "0x10", "2024-01-01", "#a", "a: b", "@x"]


@pytest.mark.parametrize("word", WORDS)
def test_a_text_field_keeps_an_override_as_it_was_typed(word):
    assert good("", f"name={word}").name == word


@pytest.mark.parametrize("word", ["1E234", "007", "1e3", "on", "12:30:45", "true", "no", "1_0"])
def test_a_text_field_keeps_a_yaml_word_as_it_was_written(word):
    assert good(f"name: {word}").name == word


@pytest.mark.parametrize("word", ["7.5", "8.0", "true", "abc", "010", "1e3", "'7'", "[1]", "null"])
def test_a_whole_number_field_refuses_anything_else_in_yaml_and_in_overrides(word):
    told = bad(f"steps: {word}")
    assert len(told) == 1
    assert told[0].startswith("f.yaml: steps: is ")
    assert "must be a whole number" in told[0]
    assert bad("", f"steps={word}")[0].startswith("override: steps: is ")


def test_underscores_in_whole_numbers_separate_thousands():
    assert good("", "steps=1_000").steps == 1000


@pytest.mark.parametrize(
    ("word", "value"), [("1e-5", 1e-5), ("1", 1.0), ("1.0e+2", 100.0), (".5", 0.5)]
)
def test_a_number_field_reads_scientific_notation_and_whole_numbers(word, value):
    assert good("", f"sampling.temperature={word}").sampling.temperature == value
    assert isinstance(good(f"sampling: {{temperature: {word}}}").sampling.temperature, float)


@pytest.mark.parametrize("word", ["yes", "on", "1", "'true'"])
def test_a_switch_takes_true_and_false_only(word):
    assert "must be true or false" in bad(f"is_on: {word}")[0]


def test_a_mapping_given_as_an_override_is_taken_exactly():
    config = good(
        "sampling: {limit: 9}", 'sampling={temperature: 0.5, stop: ["a,b","c"], limit: null}'
    )
    assert config.sampling == Sampling(temperature=0.5, stop=("a,b", "c"), limit=None)


def test_a_mapping_override_replaces_the_section_and_a_key_override_changes_one_key():
    text = "sampling: {temperature: 0.5, limit: 9}"
    assert good(text, "sampling={limit: 3}").sampling == Sampling(limit=3)
    assert good(text, "sampling.limit=3").sampling == Sampling(temperature=0.5, limit=3)


@pytest.mark.parametrize("word", ["null", "None", "none", "", "~"])
def test_null_words_mean_null_for_optional_keys_and_an_error_for_required_ones(word):
    assert good("", f"sampling.limit={word}").sampling.limit is None
    assert good(f"label: {word}").label is None
    for key in ("steps", "name", "sampling.temperature", "sampling"):
        assert bad("", f"{key}={word}")[0].startswith(f"override: {key}: is ")


def test_a_quoted_null_word_is_text():
    assert good("name: 'none'").name == "none"
    assert good("", 'label="null"').label == "null"


def test_explicit_null_survives_writing_and_reading_again():
    config = good("", "sampling.limit=null")
    again = good(write_yaml(untyped_values(config)))
    assert again.sampling.limit is None
    assert again == config


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    assert bad("smapling: {}") == ["f.yaml: smapling: unknown key. Did you mean 'sampling'?"]
    assert bad("", "sampling.limti=3") == [
        "override: sampling.limti: unknown key. Did you mean 'limit'?"
    ]


def test_a_key_of_another_section_is_pointed_to():
    assert bad("temperature: 1")[0].endswith("Did you mean 'sampling.temperature'?")


def test_a_key_of_another_kind_says_which_kind_has_it():
    assert bad("", "optimizer.kind=sgd", "optimizer.lr=1") == [
        "override: optimizer.lr: unknown key with optimizer.kind=sgd; kind adam has it. "
        "Set optimizer.kind=adam, or take the key out."
    ]
    assert "kind sgd has it" in bad("optimizer: {momentum: 1}")[0]


def test_a_shortened_key_is_an_error_and_not_another_key():
    assert "unknown key" in bad("step: 3")[0]
    assert "unknown key" in bad("", "samplin.limit=3")[0]


def test_everything_wrong_is_told_at_once():
    told = bad("steps: 1.5\nnmae: a\nsampling: {temperature: -1, limit: x}\nphases: [{stop: 3}]")
    assert [line.split(": ")[1] for line in told] == [
        "steps",
        "nmae",
        "sampling.limit",
        "sampling.temperature",
        "phases.0.stop",
    ]


def test_a_bound_is_told_with_the_value_and_the_bound():
    assert bad("sampling: {temperature: -1}") == [
        "f.yaml: sampling.temperature: is -1.0; must be >= 0.0."
    ]


def test_a_cross_check_speaks_of_the_key_it_names():
    assert bad("", "steps=13") == ["override: steps: is 13; must not be 13. Take 12"]


def test_listed_words_are_checked_with_a_suggestion():
    assert good("bound: unlimited").bound == "unlimited"
    assert good("colour: blue").colour is Colour.BLUE
    assert "Did you mean 'unlimited'?" in bad("bound: unlimted")[0]
    assert bad("colour: green") == ["f.yaml: colour: is green; must be red, blue."]


def test_a_section_with_variants_is_chosen_by_its_kind():
    assert good("optimizer: {kind: sgd, momentum: 0.9}").optimizer == Sgd(momentum=0.9)
    assert good("", "optimizer.lr=1e-4").optimizer == Adam(lr=1e-4)
    told = bad("optimizer: {kind: sgdd}")
    assert told == ["f.yaml: optimizer.kind: is sgdd; must be adam, sgd. Did you mean 'sgd'?"]


def test_an_item_of_a_list_can_be_overridden():
    text = "phases: [{limit: 1}, {limit: 2}]"
    assert [p.limit for p in good(text, "phases.1.limit=7").phases] == [1, 7]
    with pytest.raises(ValueError, match="no item of a list of 2"):
        read(text, "phases.2.limit=7")


def test_values_without_a_schema_follow_yaml_1_2():
    config = good("args: {a: on, b: 1e-5, c: 010, d: 3, e: 'x', f: null, g: [true, no]}")
    assert config.args == {
        "a": "on",
        "b": 1e-5,
        "c": "010",
        "d": 3,
        "e": "x",
        "f": None,
        "g": [True, "no"],
    }


def test_a_key_given_twice_is_an_error_that_names_both_places():
    with pytest.raises(ValueError, match=r"f.yaml: line 2: 'steps' is given twice"):
        read("steps: 1\nsteps: 2")


def test_broken_yaml_is_told_with_its_line():
    with pytest.raises(ValueError, match=r"f.yaml: line 2: is not valid YAML"):
        read("steps: 1\n\tname: a")
    with pytest.raises(ValueError, match=r"f.yaml: is nested too deep"):
        read("args: " + "[" * 5000)


def test_an_anchor_that_contains_itself_is_refused():
    with pytest.raises(ValueError, match="contains itself"):
        read("args: &a {b: *a}")


@pytest.mark.parametrize("override", ["steps", "=1", ".steps=1", "optimizer..momentum=1", "a.=1"])
def test_an_override_without_a_whole_key_or_an_equals_sign_is_refused(override):
    with pytest.raises(ValueError, match="is not of the form key=value"):
        read("", override)


def test_all_keys_lists_sections_and_their_keys():
    assert {"sampling", "sampling.limit", "optimizer.momentum", "phases.stop"} <= set(
        all_keys(Sample)
    )


text_values = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12
) | st.sampled_from([*WORDS, "null", "None", "", "~", "1_0", ".inf", "-", "? a", "'", '"', "a #b"])
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text_values, inner, max_size=3),
    max_leaves=8,
)


@given(
    name=text_values,
    label=st.none() | text_values,
    steps=st.integers(14, 10**12),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    args=st.dictionaries(text_values, plain_values, max_size=4),
)
def test_a_written_config_reads_back_as_the_same_config(name, label, steps, lr, args):
    config = Sample(name=name, label=label, steps=steps, args=args, optimizer=Adam(lr=lr))
    again = good(write_yaml(untyped_values(config)))
    assert again == config
    assert repr(again) == repr(config)  # 1 is not 1.0, "1" is not 1
