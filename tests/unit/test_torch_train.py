"""The torch train engine on tiny models: exact numbers, guarded updates, exact resume."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import NormConfig
from areal_ray.algorithms.packing import TrainSequence
from areal_ray.core.trajectory import Group
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.reward_model import RewardModelScore
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.sft import SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from areal_ray.errors import ArealRayError, DataError, EngineError
from areal_ray.telemetry.names import METRICS
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2)


def _engine(folder, *, kind="grpo", lr=1e-3, total_steps=4, optimizer=None, engine=None, **fields):
    config = LearnerConfig(
        engine=TorchTrainConfig(**{"dtype": "float64", **(engine or {})}),
        optimizer=OptimizerConfig(lr=lr, **(optimizer or {})),
    )
    objective = ObjectiveConfig(kind=kind, **fields)
    return TorchTrainEngine(folder, config, objective=objective, total_steps=total_steps)


def _groups(count=4, seed=0, **shape):
    rng = np.random.default_rng(seed)
    return [random_group(rng, number, **shape) for number in range(count)]


def _copies(engine):
    return {name: tensor.clone() for name, tensor in engine.weights().items()}


def _largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Rows


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "gemma", "gpt2"])
def test_shared_rows_give_each_token_the_log_prob_of_the_model_itself(family, attention, tmp_path):
    write_tiny_model(tmp_path, family)
    config = TorchTrainConfig(max_tokens_per_mb=200, attention=attention)
    model = load_causal_model(tmp_path, config)
    forward = RowForward(model, config)
    assert forward.shares_prefixes(64)
    trajectories = [t for group in _groups(2) for t in group.trajectories]
    sequences = [TrainSequence(t.token_ids, t.loss_mask, int(t.group_id[-1])) for t in trajectories]
    found = torch.zeros(sum(s.num_trained for s in sequences))
    batches = forward.micro_batches(sequences)
    assert all((batch.joined is None) == (attention == "sdpa") for batch in batches)
    masks = [b.joined.blocks.segment_ids if b.joined else [b.segment_ids] for b in batches]
    assert any(ids is not None for of_batch in masks for ids in of_batch)
    with torch.no_grad():
        for batch in batches:
            found[torch.from_numpy(batch.origins)] = forward(batch, 0.8).logprobs
        expected = []
        for trajectory in trajectories:
            ids = torch.from_numpy(trajectory.token_ids).long()
            table = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)
            at = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
            expected.append(table[at - 1, ids[at]])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=0)


def test_logits_that_a_family_scales_after_its_head_are_taken_whole(tmp_path):
    from transformers import AutoModelForCausalLM, CohereConfig

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100}
    config = CohereConfig(**shape, logit_scale=0.25, initializer_range=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = TorchTrainConfig()
    model = load_causal_model(tmp_path, engine)
    forward = RowForward(model, engine)
    ids = np.arange(5, dtype=np.int32)
    (batch,) = forward.micro_batches([TrainSequence(ids, ids > 2, 0)])
    with torch.no_grad():
        found = forward(batch, 1.0).logprobs
        table = torch.log_softmax(model(torch.arange(5)[None]).logits[0], -1)
    torch.testing.assert_close(found, table[[2, 3], [3, 4]], atol=1e-5, rtol=0)


def test_beyond_a_sliding_window_rows_are_not_shared(tmp_path):
    write_tiny_model(tmp_path, "mistral", sliding_window=16)
    config = TorchTrainConfig()
    model = load_causal_model(tmp_path, config)
    forward = RowForward(model, config)
    assert forward.shares_prefixes(16)
    assert not forward.shares_prefixes(17)


@pytest.mark.parametrize("name", ["reference", "teacher", "critic"])
@pytest.mark.parametrize("path", ["nobody/has-this-model", "{}"])
def test_a_model_beside_the_policy_that_cannot_be_loaded_is_told_by_its_own_key(
    folder, tmp_path, name, path
):
    beside = Companions(**{f"{name}_path": path.format(tmp_path)})
    with pytest.raises(EngineError) as told:
        TorchTrainEngine(folder, LearnerConfig(), companions=beside)
    assert str(told.value).startswith(f"{name}.path: cannot load the model at ")
    assert "model.path" not in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_a_reward_model_that_cannot_be_loaded_is_told_by_the_rewards_key(tmp_path):
    with pytest.raises(DataError, match=r"^reward\.args\.path: '.*' holds no config\.json"):
        RewardModelScore().prepare(path=str(tmp_path))


def test_a_folder_without_a_model_is_reported_with_its_key(tmp_path):
    with pytest.raises(EngineError, match=r"Check model\.path"):
        load_causal_model(tmp_path, TorchTrainConfig())


# Exactness

# Adam divides each gradient by its own size, so it blows rounding up where a gradient is next to
# nothing (Hugging Face's norms compute in float32). With this eps it cannot.
_CALM = {"eps": 1e-4}

_LAYOUTS = {
    "small micro-batches": {"engine": {"max_tokens_per_mb": 60}},
    "plain rows": {"engine": {"share_prefixes": False}},
    "one sequence at a time": {"engine": {"share_prefixes": False, "max_tokens_per_mb": 1}},
    "nothing skipped": {"skip_zero_advantage": False},
}


@pytest.mark.parametrize("kind", ["grpo", "ppo", "decoupled_ppo"])
def test_a_step_is_the_same_however_the_batch_is_cut(folder, kind):
    groups = [*_groups(3), *_groups(1, seed=9, siblings=6, prompt_tokens=20)]
    groups.append(_groups(1, seed=5, rewards=[1.0] * 4)[0])
    reference = _engine(folder, kind=kind, optimizer=_CALM)
    first = reference.train_step([groups[:2], groups[2:]], 0)
    expected = _copies(reference)
    assert first.num_updates == 2
    for layout, fields in _LAYOUTS.items():
        engine = _engine(folder, kind=kind, optimizer=_CALM, **fields)
        stats = engine.train_step([groups[1::-1], groups[:1:-1]], 0)
        assert _largest_difference(_copies(engine), expected) < 1e-6, layout
        assert stats.metrics["learner/loss"] == pytest.approx(first.metrics["learner/loss"])
        assert stats.trained_tokens == first.trained_tokens


def test_every_number_a_step_reports_is_declared(folder):
    engine = _engine(folder, kind="decoupled_ppo", c_clip=3.0)
    reported = engine.train_step([_groups(2)], 1).metrics
    reported |= engine.sft_step([_example(0)]).metrics
    assert [name for name in reported if name not in METRICS] == []
    assert all(math.isfinite(value) for value in reported.values())


def test_the_loss_is_the_global_mean_over_tokens_or_sequences(folder):
    groups = _groups(3)
    for aggregation in ("token_mean", "sequence_mean"):
        engine = _engine(folder, aggregation=aggregation, skip_zero_advantage=False)
        rewards = [[t.reward for t in group.trajectories] for group in groups]
        batches = [t for group in groups for t in group.trajectories]
        ratios = _ratios(folder, batches)
        losses, advantages = [], []
        for values in rewards:
            spread = np.std(values)
            advantages += [(r - np.mean(values)) / spread if spread else 0.0 for r in values]
        for ratio, advantage in zip(ratios, advantages, strict=True):
            losses.append(np.maximum(-ratio * advantage, -ratio.clip(0.8, 1.2) * advantage))
        expected = (
            np.mean([loss.mean() for loss in losses])
            if aggregation == "sequence_mean"
            else np.concatenate(losses).mean()
        )
        stats = engine.train_step([groups], 0)
        assert stats.metrics["learner/loss"] == pytest.approx(expected, abs=1e-9)
        assert stats.metrics["learner/ratio_max"] == pytest.approx(
            max(ratio.max() for ratio in ratios)
        )


def _ratios(folder, trajectories):
    model = load_causal_model(folder, TorchTrainConfig(dtype="float64"))
    ratios = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()
        with torch.no_grad():
            table = torch.log_softmax(model(ids[None]).logits[0], -1)
        at = np.flatnonzero(trajectory.loss_mask)
        logprobs = table[at - 1, ids[at]].numpy()
        ratios.append(np.exp(logprobs - trajectory.behaviour_logprobs[at]))
    return ratios


def _with_true_logprobs(folder, groups, temperature):
    """The same groups with behaviour log-probs as an engine with these weights reports them."""
    model = load_causal_model(folder, TorchTrainConfig(dtype="float64"))
    changed = []
    for group in groups:
        trajectories = []
        for trajectory in group.trajectories:
            ids = torch.from_numpy(trajectory.token_ids).long()
            with torch.no_grad():
                table = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)
            logprobs = np.zeros(len(ids), np.float32)
            at = np.flatnonzero(trajectory.loss_mask)
            logprobs[at] = table[at - 1, ids[at]].numpy()
            trajectories.append(replace(trajectory, behaviour_logprobs=logprobs))
        changed.append(Group(group.group_id, group.task_id, tuple(trajectories)))
    return changed


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_groups_sampled_by_these_weights_have_ratio_one(folder, temperature):
    groups = _with_true_logprobs(folder, _groups(3), temperature)
    config = LearnerConfig(engine=TorchTrainConfig(dtype="float64"))
    objective = ObjectiveConfig(kind="decoupled_ppo")
    engine = TorchTrainEngine(folder, config, objective=objective, temperature=temperature)
    metrics = engine.train_step([groups], 0).metrics
    assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["learner/behaviour_weight_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learner/behaviour_kl_nats"] == pytest.approx(0.0, abs=1e-9)


def test_later_minibatches_clip_around_the_weights_at_the_start_of_the_step(folder):
    groups = _with_true_logprobs(folder, _groups(4), 1.0)
    engine = _engine(folder, kind="decoupled_ppo", lr=0.02)
    metrics = engine.train_step([groups[:2], groups[2:]], 0).metrics
    # The behaviour policy is the one at the start of the step, so its weight stays 1; the policy
    # has moved when the second minibatch comes.
    assert metrics["learner/behaviour_weight_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learner/policy_kl_nats"] > 1e-4


# What must not update


def test_a_step_without_anything_to_learn_changes_nothing_and_is_counted(folder):
    for groups in ([], _groups(2, rewards=[1.0] * 4), _groups(2, rewards=[None] * 4)):
        for skip in (True, False):
            engine = _engine(folder, skip_zero_advantage=skip)
            before = _copies(engine)
            stats = engine.train_step([groups, groups], 0)
            assert _largest_difference(_copies(engine), before) == 0.0
            assert stats.num_updates == 0
            assert stats.metrics["learner/empty_updates"] == 2
            assert stats.metrics["learner/skipped_steps"] == 1
            assert not any(math.isnan(value) for value in stats.metrics.values())


def test_an_empty_minibatch_beside_a_full_one_contributes_nothing(folder):
    groups = _groups(2)
    alone, beside = _engine(folder), _engine(folder)
    alone.train_step([groups], 0)
    stats = beside.train_step([_groups(1, rewards=[0.0] * 4), groups], 0)
    assert _largest_difference(_copies(alone), _copies(beside)) == 0.0
    assert (stats.num_updates, stats.metrics["learner/empty_updates"]) == (1, 1)


def test_a_step_of_tokens_that_are_all_too_old_changes_nothing(folder):
    engine = _engine(folder)
    before = _copies(engine)
    groups = _groups(2, version=1)
    stats = engine.train_step([groups], 5, oldest_version=2)
    assert _largest_difference(_copies(engine), before) == 0.0
    sampled = sum(t.num_sampled_tokens for g in groups for t in g.trajectories)
    assert stats.metrics["learner/masked_stale_tokens"] == sampled
    assert stats.trained_tokens == 0


def test_a_gradient_that_overflows_is_skipped_and_counted_and_training_goes_on(folder):
    engine = _engine(folder, reward_norm=NormConfig(mean="group"), engine={"dtype": "float32"})
    before = _copies(engine)
    broken = _groups(1, rewards=[1e38, -1e38, 1e38, 0.0])
    stats = engine.train_step([broken], 0)
    assert _largest_difference(_copies(engine), before) == 0.0
    assert stats.metrics["learner/non_finite_updates"] == 1
    engine.train_step([_groups(2)], 0)
    after = _copies(engine)
    assert _largest_difference(after, before) > 0.0
    assert all(tensor.isfinite().all() for tensor in after.values())


# Learning


def test_what_was_rewarded_becomes_likelier(folder):
    engine = _engine(folder, kind="ppo", lr=5e-3, engine={"dtype": "float32"})
    groups = _with_true_logprobs(folder, _groups(4, rewards=[1.0, 1.0, 0.0, 0.0]), 1.0)

    def likelihoods():
        return [
            engine.evaluate_sft(
                [
                    SftExample(g.trajectories[i].token_ids, g.trajectories[i].loss_mask)
                    for g in groups
                ]
            ).loss
            for i in (0, 2)
        ]

    good_before, bad_before = likelihoods()
    for version in range(3):
        engine.train_step([groups], version)
    good_after, bad_after = likelihoods()
    assert good_after < good_before
    assert bad_after > bad_before


def _example(seed, length=10, own=6):
    ids = np.random.default_rng(seed).integers(4, 300, length).astype(np.int32)
    mask = np.arange(length) >= length - own
    mask[-2] = False  # two spans
    return SftExample(ids, mask)


def test_supervised_training_reproduces_what_it_was_shown(folder):
    engine = _engine(folder, lr=5e-3, total_steps=60, engine={"dtype": "float32"})
    examples = [_example(seed) for seed in range(4)]
    before = engine.evaluate_sft(examples)
    assert before.exact_match == 0.0
    for _ in range(60):
        stats = engine.sft_step(examples)
    after = engine.evaluate_sft(examples)
    assert stats.metrics["learner/loss"] < 0.1
    assert stats.trained_tokens == 4 * 5
    assert after.exact_match == after.token_accuracy == 1.0
    assert after.span_exact_match == (1.0, 1.0)
    assert after.num_examples == 4
    assert after.loss < before.loss


def test_the_supervised_loss_is_the_mean_over_all_trained_tokens(folder):
    engine = _engine(folder)
    examples = [_example(1, length=6, own=3), _example(2, length=20, own=15)]
    sequences = [_trajectory_like(example) for example in examples]
    model = load_causal_model(folder, TorchTrainConfig(dtype="float64"))
    losses = []
    for ids, at in sequences:
        with torch.no_grad():
            table = torch.log_softmax(model(ids[None]).logits[0], -1)
        losses.append(-table[at - 1, ids[at]])
    stats = engine.sft_step(examples)
    assert stats.metrics["learner/loss"] == pytest.approx(torch.cat(losses).mean().item())


def _trajectory_like(example):
    ids = torch.from_numpy(example.token_ids).long()
    return ids, torch.from_numpy(np.flatnonzero(example.loss_mask))


def test_one_wrong_token_spoils_its_span_and_its_example_only(folder):
    engine = _engine(folder, lr=5e-3, engine={"dtype": "float32"})
    examples = [_example(seed) for seed in range(2)]
    for _ in range(60):
        engine.sft_step(examples)
    spoiled = examples[0].token_ids.copy()
    spoiled[-1] = (spoiled[-1] + 1) % 300
    seen = engine.evaluate_sft([SftExample(spoiled, examples[0].loss_mask), examples[1]])
    assert seen.exact_match == 0.5
    assert seen.span_exact_match == (1.0, 0.5)
    assert seen.token_accuracy == pytest.approx(0.9)


def test_supervised_steps_without_examples_change_nothing(folder):
    engine = _engine(folder)
    before = _copies(engine)
    stats = engine.sft_step([])
    assert _largest_difference(_copies(engine), before) == 0.0
    assert stats.metrics["learner/empty_updates"] == 1
    assert engine.evaluate_sft([]).exact_match == 0.0


def test_gradient_checkpointing_changes_nothing_but_memory(folder):
    one = _engine(folder, engine={"dtype": "float32"})
    other = _engine(folder, engine={"dtype": "float32", "gradient_checkpointing": True})
    groups = _groups(2)
    losses = [e.train_step([groups], 0).metrics["learner/loss"] for e in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert _largest_difference(_copies(one), _copies(other)) < 1e-4


def test_bfloat16_computes_roughly_the_same_and_keeps_float32_weights(folder):
    one = _engine(folder, engine={"dtype": "float32"})
    other = _engine(folder, engine={"dtype": "bfloat16"})
    groups = _with_true_logprobs(folder, _groups(2), 1.0)
    metrics = [e.train_step([groups], 0).metrics for e in (one, other)]
    assert metrics[1]["learner/ratio_mean"] == pytest.approx(1.0, abs=0.05)
    assert metrics[1]["learner/grad_norm_max"] == pytest.approx(
        metrics[0]["learner/grad_norm_max"], rel=0.1
    )
    assert all(tensor.dtype == torch.float32 for tensor in other.weights().values())
    assert all(tensor.isfinite().all() for tensor in other.weights().values())


# Checkpoints


def test_two_steps_resumed_for_two_more_are_four_steps(folder, tmp_path):
    schedule = {"lr_scheduler_type": "cosine", "warmup_steps": 1}
    straight = _engine(folder, kind="decoupled_ppo", optimizer=schedule)
    steps = [[_groups(2, seed=s), _groups(2, seed=10 + s)] for s in range(4)]
    rates = [straight.train_step(step, 0).metrics["learner/lr"] for step in steps]
    first = _engine(folder, kind="decoupled_ppo", optimizer=schedule)
    resumed_rates = [first.train_step(step, 0).metrics["learner/lr"] for step in steps[:2]]
    first.save(tmp_path)
    second = _engine(tmp_path, kind="decoupled_ppo", optimizer=schedule)
    second.load(tmp_path)
    assert second.steps_taken == 2
    resumed_rates += [second.train_step(step, 0).metrics["learner/lr"] for step in steps[2:]]
    assert resumed_rates == rates
    assert len(set(rates)) == 4
    assert _largest_difference(_copies(second), _copies(straight)) < 1e-6


def test_a_checkpoint_is_an_ordinary_hugging_face_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = write_tiny_model(tmp_path / "source")
    engine = _engine(source, engine={"dtype": "float32"})
    engine.train_step([_groups(2)], 0)
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    weights = engine.weights()
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert not any("lm_head" in name for name in weights)  # tied: once, as the embedding
    ids = torch.arange(4, 14)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, engine._model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    message = [{"role": "user", "content": "What is 12 plus 30?"}]
    expected = AutoTokenizer.from_pretrained(source).apply_chat_template(message)
    assert tokenizer.apply_chat_template(message) == expected
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id is not None


def test_tokenizer_files_outlive_the_folder_the_model_came_from(tmp_path):
    source = write_tiny_model(tmp_path / "source")
    engine = _engine(source)
    for file in source.iterdir():
        file.unlink()
    source.rmdir()
    engine.export(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").stat().st_size > 0
    assert (tmp_path / "model" / "config.json").exists()


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(folder, tmp_path):
    engine = _engine(folder)
    with pytest.raises(DataError, match=str(tmp_path)):
        engine.load(tmp_path)
    engine.save(tmp_path)
    whole = (tmp_path / "trainer_state.pt").read_bytes()
    (tmp_path / "trainer_state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot resume"):
        engine.load(tmp_path)


@pytest.mark.parametrize("file", ["trainer_state.pt", "model.safetensors"])
def test_a_checkpoint_of_the_right_size_with_other_bytes_is_one_line_that_names_it(
    folder, tmp_path, file
):
    engine = _engine(folder)
    engine.save(tmp_path)
    path = tmp_path / file
    path.write_bytes(b"\x93" * path.stat().st_size)
    with pytest.raises(ArealRayError, match=re.escape(str(tmp_path))) as caught:
        engine.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
