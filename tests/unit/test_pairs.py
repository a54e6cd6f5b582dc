"""Learning from pairs: the section, the tokens, and steps that do not depend on packing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_ray.core.task import Task
from areal_ray.engines.preference import HeldOutPairs, PairTask, PreferenceConfig, PreferencePair
from areal_ray.engines.reward_model import RewardModelScore, load_score_model, score_tokens
from areal_ray.engines.sft import SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from areal_ray.errors import DataError
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.pair_source import PairSource, tokenize_pair
from areal_ray.telemetry.names import METRICS
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"))


def section(**fields):
    return PreferenceConfig(**{"source": "m:f", "steps": 10, "batch_size": 4} | fields)


def pairs(count=6, seed=0):
    """Answers of different lengths to prompts of different lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = rng.integers(4, 300, int(rng.integers(3, 9)))
        answers = []
        for _ in range(2):
            own = rng.integers(4, 300, int(rng.integers(2, 8)))
            mask = np.arange(len(prompt) + len(own)) >= len(prompt)
            answers.append(SftExample(np.append(prompt, own).astype(np.int32), mask))
        made.append(PreferencePair(*answers))
    return made


def engine(folder, config, *, is_scored=False, budget=4096, lr=1e-3):
    learner = LearnerConfig(
        engine=TorchTrainConfig(dtype="float64", max_tokens_per_mb=budget),
        optimizer=OptimizerConfig(lr=lr, eps=1e-4),
    )
    beside = Companions(reference_path="" if is_scored else str(folder))
    return TorchTrainEngine(
        folder, learner, total_steps=9, companions=beside, pairs=PairTask(config, is_scored)
    )


# The section


def test_held_out_pairs_are_looked_at_at_both_ends_and_between():
    config = section(held_out=HeldOutPairs(), every_steps=4)
    assert [step for step in range(11) if config.is_look_due(step)] == [0, 4, 8, 10]
    assert [s for s in range(11) if section(held_out=HeldOutPairs()).is_look_due(s)] == [0, 10]
    assert not any(section(every_steps=2).is_look_due(step) for step in range(11))


def test_ipo_averages_over_tokens_and_the_others_sum_unless_told():
    assert section(loss="ipo").averages_tokens
    assert not section().averages_tokens
    assert section(length_normalised=True).averages_tokens
    with pytest.raises(ValueError, match="it belongs to 'sigmoid'"):
        section(loss="ipo", label_smoothing=0.1)


# Tokens


def test_only_the_answer_and_its_end_are_marked(folder):
    template = ChatTemplate.from_folder(folder)
    prompt = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "More?"},
    ]
    pair = tokenize_pair(template, (prompt, "Yes, 42.", "No."), "here")
    asked = template.prompt_ids(prompt)
    for answer, text in ((pair.chosen, "Yes, 42."), (pair.rejected, "No.")):
        assert answer.token_ids[: len(asked)].tolist() == asked
        own = answer.token_ids[answer.loss_mask].tolist()
        assert template.decode(own) == text
        assert own[-1] in template.end_ids
        assert len(own) + len(asked) == len(answer.token_ids)


@pytest.mark.parametrize("row", [("a", "b"), ([], "a", "b"), ([{"role": "user"}], "a", 3), "abc"])
def test_a_row_that_is_no_pair_is_refused_by_name(folder, row):
    with pytest.raises(DataError, match=r"m:f row 3: (is a|must be)"):
        tokenize_pair(ChatTemplate.from_folder(folder), row, "m:f row 3")


def test_ranks_share_out_a_batch_and_long_or_equal_pairs_are_left_out(folder):
    config = section(source="tests.support.pairs:mixed", max_tokens=40, held_out=HeldOutPairs())
    alone = PairSource(config, str(folder))
    shared = [PairSource(config, str(folder), rank=rank, num_ranks=2) for rank in range(2)]
    for begins in range(0, 4 * config.batch_size, config.batch_size):
        whole = [p.chosen.token_ids.tolist() for p in alone.batch(begins)]
        first, second = ([p.chosen.token_ids.tolist() for p in s.batch(begins)] for s in shared)
        assert (first, second) == (whole[::2], whole[1::2])
    assert len(alone.held_out()) == 6
    with pytest.raises(DataError, match="none of them with two different answers"):
        PairSource(config.model_copy(update={"max_tokens": 4}), str(folder)).batch(0)


# Steps


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_step_does_not_depend_on_how_pairs_are_packed(folder, is_scored, loss):
    made = []
    for budget in (4096, 20):
        trained = engine(folder, section(loss=loss), is_scored=is_scored, budget=budget)
        for _ in range(2):
            stats = trained.pair_step(pairs())
        made.append((stats.metrics, dict(trained.weights())))
    (one, weights), (other, others) = made
    assert one["learner/micro_batches"] < other["learner/micro_batches"]
    for name in ("learner/loss", "learner/grad_norm_max", "reward/margin_mean"):
        assert one[name] == pytest.approx(other[name], rel=1e-9)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-9, rtol=0)
    assert all(name in METRICS for name in one)


def test_dpo_starts_at_the_log_of_two_and_its_gradient_is_that_of_the_formula(folder):
    config = section(beta=0.3)
    trained = engine(folder, config)
    given = pairs(3)
    stats = trained.pair_step(given)
    assert stats.metrics["learner/loss"] == pytest.approx(math.log(2))
    assert stats.metrics["learner/pair_accuracy_fraction"] == 0.5
    seen = trained.evaluate_pairs(given)
    assert seen.num_pairs == 3
    assert seen.loss < math.log(2)
    # By hand, a pair at a time: beta * (log ratio of the better - log ratio of the worse).
    start, now = (TorchTrainEngine(folder, LearnerConfig(engine=TorchTrainConfig(dtype="float64")))
                  for _ in range(2))  # fmt: skip
    now._model.load_state_dict(trained._model.state_dict())
    margins = [
        0.3 * (ratio(now, start, pair.chosen) - ratio(now, start, pair.rejected)) for pair in given
    ]
    assert seen.margin == pytest.approx(np.mean(margins), rel=1e-6)
    assert seen.loss == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margins]))


def ratio(now, start, answer):
    return log_prob(now._model, answer) - log_prob(start._model, answer)


def log_prob(model, answer):
    """Of the marked tokens, from the model's own logits."""
    ids = torch.from_numpy(answer.token_ids.astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
    own = table.gather(-1, ids[1:, None])[:, 0]
    return float(own[torch.from_numpy(answer.loss_mask[1:])].sum())


def test_an_empty_share_takes_no_step(folder):
    trained = engine(folder, section())
    stats = trained.pair_step([])
    assert stats.num_updates == 0
    assert stats.metrics["learner/empty_updates"] == 1
    assert trained.evaluate_pairs([]).num_pairs == 0


# Reward models


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_trained_reward_model_is_what_transformers_loads_as_a_classifier(family, tmp_path):
    from transformers import AutoModelForSequenceClassification

    trained = engine(
        write_tiny_model(tmp_path / "start", family), section(), is_scored=True, lr=0.01
    )
    given = pairs(4)
    assert trained.evaluate_pairs(given).accuracy == 0.5, "a new head is 0: all scores tie"
    for _ in range(8):
        trained.pair_step(given)
    assert trained.evaluate_pairs(given).accuracy == 1.0
    trained.export(tmp_path / "made")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "made")
    assert loaded.config.num_labels == 1
    answers = [a for p in given for a in (p.chosen, p.rejected)]
    longest = max(len(a.token_ids) for a in answers)
    padded = np.full((len(answers), longest), loaded.config.pad_token_id, np.int64)
    for row, answer in zip(padded, answers, strict=True):
        row[: len(answer.token_ids)] = answer.token_ids
    with torch.no_grad():
        theirs = loaded(input_ids=torch.from_numpy(padded)).logits[:, 0]
    ours = [score_tokens(loaded, a.token_ids) for a in answers]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    margin = np.mean(np.array(ours[::2]) - np.array(ours[1::2]))
    assert trained.evaluate_pairs(given).margin == pytest.approx(margin, abs=1e-4)


def test_a_reward_model_goes_on_from_its_checkpoint(folder, tmp_path):
    trained = engine(folder, section(), is_scored=True)
    trained.pair_step(pairs())
    trained.save(tmp_path)
    expected = trained.pair_step(pairs(seed=1)).metrics["learner/loss"]
    again = engine(tmp_path, section(), is_scored=True)
    again.load(tmp_path)
    assert again.pair_step(pairs(seed=1)).metrics["learner/loss"] == pytest.approx(expected)


def test_padding_is_never_the_token_that_ends_an_answer(tmp_path):
    write_tiny_model(tmp_path, pad_token_id=2)  # as its end of turn
    model = load_score_model(tmp_path, TorchTrainConfig())
    assert model.config.pad_token_id not in (2, None)


def test_a_reward_model_scores_the_recorded_ids_up_to_the_last_sampled_one(folder, tmp_path):
    made = engine(folder, section(), is_scored=True, lr=0.01)
    made.pair_step(pairs())
    made.export(tmp_path)
    trajectory = random_group(np.random.default_rng(0)).trajectories[0]
    ended = replace(
        trajectory, loss_mask=trajectory.loss_mask & (np.arange(len(trajectory.token_ids)) < 20)
    )
    score = RewardModelScore()
    score.prepare(path=str(tmp_path))
    model = load_score_model(tmp_path, TorchTrainConfig())
    for given, length in ((trajectory, len(trajectory.token_ids)), (ended, 20)):
        sampled = int(np.flatnonzero(given.loss_mask)[-1]) + 1
        assert sampled <= length
        ids = torch.from_numpy(given.token_ids[:sampled].astype(np.int64))
        with torch.no_grad():
            expected = float(model(input_ids=ids[None]).logits[0, 0])
        found = score(Task("t", ()), given, path=str(tmp_path))["reward"]
        assert found == pytest.approx(expected, abs=1e-5)
        assert found != 0.0


def test_a_reward_model_of_another_vocabulary_refuses_ids_it_does_not_know(folder):
    group = random_group(np.random.default_rng(0), vocab_size=4000)
    with pytest.raises(DataError, match="knows token ids below 384"):
        RewardModelScore()(None, group.trajectories[0], path=str(folder))
