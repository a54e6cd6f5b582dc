"""Rows end to end are what padded rows are, gradients too; what cannot be read so is padded."""

import logging

import numpy as np
import pytest
import torch

from areal_ray.algorithms.packing import TrainSequence
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.sft import OfflineDistillationConfig, SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import Companions, LearnerConfig, TorchTrainConfig
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model


def _forward(folder, attention="auto", **engine):
    config = TorchTrainConfig(attention=attention, **{"max_tokens_per_mb": 150, **engine})
    model = load_causal_model(folder, config)
    return model, RowForward(model, config)


def _sequences():
    """Groups that share a prompt, and sequences of many lengths that share none."""
    rng = np.random.default_rng(0)
    shared = [
        TrainSequence(t.token_ids, t.loss_mask, number)
        for number in range(3)
        for t in random_group(rng, number).trajectories
    ]
    alone = [rng.integers(4, 300, length).astype(np.int32) for length in (5, 12, 12, 19, 60, 170)]
    return [*shared, *(TrainSequence(ids, ids != ids[0], 9 + n) for n, ids in enumerate(alone))]


def _scored(folder, attention, sequences, **engine):
    """Batches, log-probs of all trained tokens, and the gradient of a weighted sum of them."""
    model, forward = _forward(folder, attention, **engine)
    column = forward.new_column(sum(s.num_trained for s in sequences))
    batches = forward.micro_batches(sequences)
    for batch in batches:
        logprobs = forward(batch, 0.8).logprobs
        (logprobs * torch.from_numpy(np.cos(batch.origins)).to(logprobs)).sum().backward()
        column[torch.from_numpy(batch.origins)] = logprobs.detach()
    return batches, column, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", [{}, {"gradient_checkpointing": True}, {"share_prefixes": False}])
@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2"]
)
def test_end_to_end_is_what_padded_is(family, how, tmp_path):
    heads = {} if family == "gpt2" else {"num_key_value_heads": 1}
    write_tiny_model(tmp_path, family, **heads)
    sequences = _sequences()
    batches, found, gradient = _scored(tmp_path, "auto", sequences, **how)
    padded_batches, expected, wanted = _scored(tmp_path, "sdpa", sequences, **how)
    assert all(batch.joined is not None for batch in batches)
    assert any(not batch.joined.blocks.are_exact for batch in batches)
    assert all(batch.joined is None for batch in padded_batches)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for name, tensor in wanted.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(gradient[name], tensor, atol=1e-5 * scale, rtol=0)


def test_a_model_whose_attention_is_its_own_is_padded_and_told(tmp_path, caplog):
    write_tiny_model(tmp_path, "stablelm")
    with caplog.at_level(logging.WARNING):
        batches, found, _ = _scored(tmp_path, "auto", _sequences())
    assert "StableLmForCausalLM cannot read sequences end to end" in caplog.text
    assert all(batch.joined is None for batch in batches)
    expected = _scored(tmp_path, "sdpa", _sequences())[1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_sequences_longer_than_a_window_are_padded(family, tmp_path):
    write_tiny_model(tmp_path, family, sliding_window=16)
    _, forward = _forward(tmp_path)
    assert forward.joins_rows(16)
    assert not forward.joins_rows(17)
    batches, found, _ = _scored(tmp_path, "auto", _sequences())
    assert all(batch.joined is None for batch in batches)
    expected = _scored(tmp_path, "sdpa", _sequences())[1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_student_and_teacher_read_the_same_rows(tmp_path):
    """Also where the teacher cannot read them end to end."""
    write_tiny_model(tmp_path / "student")
    write_tiny_model(tmp_path / "teacher", "stablelm", seed=1)
    rng = np.random.default_rng(0)
    examples = [
        SftExample(rng.integers(4, 300, length).astype(np.int32), np.arange(length) > 2)
        for length in (5, 9, 20)
    ]
    losses = []
    for attention in ("auto", "sdpa"):
        engine = TorchTrainEngine(
            tmp_path / "student",
            LearnerConfig(engine=TorchTrainConfig(attention=attention)),
            companions=Companions(teacher_path=str(tmp_path / "teacher")),
            distillation=OfflineDistillationConfig(),
        )
        losses.append(engine.sft_step(examples).metrics["learner/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
