"""The shaped reward of the GSM8K recipe: right counts for all, the form of a reply for a little."""

from typing import Any

import pytest

from areal_ray.core.task import Task
from recipes.gsm8k.reward import right_or_close_to_form
from tests.support.replies import replied


def verdict(reply: str, **args: Any) -> dict[str, Any]:
    return right_or_close_to_form(Task("row-7", (), "1,080"), replied(reply), **args)


@pytest.mark.parametrize("reply", ["#### 1080", "So she has 1,080 left.", "\\boxed{1080}"])
def test_a_right_answer_counts_in_full_whatever_its_form(reply):
    told = verdict(reply + " " * 1000)
    assert (told["reward"], told["correct"]) == (1.0, 1.0)


@pytest.mark.parametrize("reply", ["#### 1081", "1080 apples, so 5", "-1080", "3 + 4 ="])
def test_a_wrong_answer_with_a_number_gets_its_form_alone(reply):
    told = verdict(reply)
    assert told["correct"] == 0.0
    assert told["reward"] == pytest.approx(0.2 * (0.5 + 0.5 * (1 - len(reply) / 400)))


def test_a_shorter_wrong_answer_gets_more_and_a_long_one_half():
    rewards = [verdict("7".rjust(length))["reward"] for length in (1, 100, 399, 400, 5000)]
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] < 0.2
    assert rewards[-2:] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("reply", ["", "   ", "####", "I do not know.", "\\boxed{", "\\boxed{}"])
def test_a_reply_without_a_number_gets_nothing(reply):
    told = verdict(reply)
    assert (told["reward"], told["correct"]) == (0.0, 0.0)


def test_the_form_can_be_worth_nothing():
    assert verdict("#### 7", form_reward=0.0)["reward"] == 0.0
