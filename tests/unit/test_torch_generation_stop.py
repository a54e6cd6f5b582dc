"""A turn ends where its text holds a stop string, whatever tokens that text is made of."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.stop_strings import StopStrings
from tests.support.generation import random_prompt, request, serving
from tests.support.tiny_models import SPECIAL_TOKENS, tiny_tokenizer, write_tiny_model

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("m") / "a", tie_word_embeddings=False, seed=1)


@pytest.fixture(scope="module")
def strings(folder):
    loaded = StopStrings(folder)
    assert loaded.load() == ""
    return loaded


@given(
    pieces=st.lists(
        st.sampled_from(("a", "b", "ab", " ", "é", "日", *SPECIAL_TOKENS)), max_size=40
    ),
    stop=st.lists(st.text("ab é日", min_size=1, max_size=6), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=200)
def test_it_is_reached_with_the_first_token_after_which_the_whole_text_holds_one(
    strings, pieces, stop
):
    ids = np.array(TOKENIZER.encode("".join(pieces)), np.int32)
    wholes = [TOKENIZER.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]
    holds = [any(s in whole for s in stop) for whole in wholes]
    first = holds.index(True) if True in holds else len(ids)
    found = [strings.is_reached(ids[: i + 1], stop) for i in range(min(first + 1, len(ids)))]
    assert found == holds[: first + 1]


def test_a_turn_ends_with_the_token_that_completes_the_text_across_a_token_border(folder):
    prompt, absent = random_prompt(0, 9), "never said"
    limit = {"max_new_tokens": 60}
    with serving(folder) as served:
        (free,) = served.run([request("free", prompt, **limit)])
        texts = [TOKENIZER.decode([i], skip_special_tokens=True) for i in free.token_ids]
        whole = TOKENIZER.decode(free.token_ids, skip_special_tokens=True)
        place = next(i for i in range(12, 50) if (texts[i] + texts[i + 1]).isascii())
        stop = "".join(texts[place : place + 2])
        assert len(stop) >= 2
        upto = next(i for i in range(60) if stop in TOKENIZER.decode(free.token_ids[: i + 1]))
        (ended,) = served.run([request("a", prompt, stop=(absent, stop), **limit)])
        (other,) = served.run([request("b", prompt, stop=(absent,), **limit)])
    assert stop in whole
    assert ended.stop_reason is StopReason.STOP
    np.testing.assert_array_equal(ended.token_ids, free.token_ids[: upto + 1])
    np.testing.assert_array_equal(ended.logprobs, free.logprobs[: upto + 1])
    np.testing.assert_array_equal(other.token_ids, free.token_ids)
    assert other.stop_reason is StopReason.LENGTH


def test_rows_with_other_stop_strings_and_none_share_a_batch(folder):
    prompt = random_prompt(0, 9)
    with serving(folder) as served:
        free = served.run([request(f"f{i}", prompt, seed=i, max_new_tokens=30) for i in range(6)])
        texts = [TOKENIZER.decode(one.token_ids) for one in free]
        letter = [next(c for c in text[5:] if c.isascii()) for text in texts]
        sent = [
            request(f"s{i}", prompt, seed=i, max_new_tokens=30, stop=(letter[i],) if i % 2 else ())
            for i in range(6)
        ]
        ended = served.run(sent)
    for i, (one, other) in enumerate(zip(free, ended, strict=True)):
        count = len(other.token_ids)
        np.testing.assert_array_equal(other.token_ids, one.token_ids[:count])
        if i % 2:
            assert letter[i] in TOKENIZER.decode(other.token_ids)
            assert letter[i] not in TOKENIZER.decode(other.token_ids[:-1])
            assert other.stop_reason is StopReason.STOP
        else:
            assert count == len(one.token_ids)


def test_without_a_tokenizer_such_a_request_fails_by_name_and_others_do_not(folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in bare.glob("token*"):
        file.unlink()
    with serving(bare) as served:
        bad, good = served.run([request("bad", [5, 6], stop=("x",)), request("good", [5, 6])])
    assert bad.error.startswith("request bad: its stop strings need the tokenizer of")
    assert len(bad.token_ids) == 0
    assert not good.error
