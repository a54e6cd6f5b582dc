"""Learning from a teacher on given conversations, through the train engine."""

import numpy as np
import pytest
import torch

from areal_ray.engines.sft import OfflineDistillationConfig, SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from areal_ray.telemetry.names import METRICS
from tests.support.tiny_models import write_tiny_model

KL = "learner/kl_teacher_nats"


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1)


def engine(student, teacher, *, budget=4096, **fields):
    learner = LearnerConfig(
        engine=TorchTrainConfig(dtype="float64", max_tokens_per_mb=budget),
        optimizer=OptimizerConfig(lr=3e-3, eps=1e-4),
    )
    return TorchTrainEngine(
        student,
        learner,
        companions=Companions(teacher_path=str(teacher)),
        distillation=OfflineDistillationConfig(**fields),
    )


def examples(count=5):
    rng = np.random.default_rng(1)
    return [
        SftExample(rng.integers(4, 300, n).astype(np.int32), np.arange(n) >= 3)
        for n in rng.integers(6, 20, count)
    ]


def exact_kl(student, teacher, direction):
    """Mean over the trained tokens, from the models' own logits."""
    total, count = 0.0, 0
    for example in examples():
        ids = torch.from_numpy(example.token_ids.astype(np.int64))[None]
        at = torch.from_numpy(example.loss_mask[1:])
        with torch.no_grad():
            ours, theirs = (
                torch.log_softmax(e._model(input_ids=ids).logits[0, :-1][at], -1)
                for e in (student, teacher)
            )
        p, q = (theirs, ours) if direction == "forward" else (ours, theirs)
        total += float((p.exp() * (p - q)).sum())
        count += int(at.sum())
    return total / count


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_over_the_whole_vocabulary_the_loss_is_the_exact_kl(student, teacher, direction):
    expected = exact_kl(engine(student, teacher), engine(teacher, teacher), direction)
    made = engine(student, teacher, top_k=None, direction=direction).sft_step(examples())
    assert made.metrics["learner/loss"] == pytest.approx(expected, rel=1e-6)
    assert made.metrics[KL] == pytest.approx(expected, rel=1e-6)
    assert all(name in METRICS for name in made.metrics)
    some = engine(student, teacher, top_k=8, direction=direction).sft_step(examples())
    assert 0.0 < some.metrics[KL] < expected


@pytest.mark.parametrize("top_k", [None, 8])
def test_a_teacher_padded_beyond_the_student_s_vocabulary_teaches_the_same(
    student, teacher, tmp_path, top_k
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 20, mean_resizing=False)
    model.lm_head.weight.data[size:] = 0.1  # no likelier than others, and no less
    model.save_pretrained(tmp_path)
    made = [
        engine(student, path, top_k=top_k).sft_step(examples()).metrics[KL]
        for path in (teacher, tmp_path)
    ]
    assert made[1] == pytest.approx(made[0], rel=1e-9)


def test_who_is_its_own_teacher_learns_nothing(student):
    own = engine(student, student, top_k=16)
    before = {name: tensor.clone() for name, tensor in own.weights().items()}
    assert own.sft_step(examples()).metrics["learner/grad_norm_max"] == pytest.approx(0, abs=1e-9)
    moved = max(float((own.weights()[n] - t).abs().max()) for n, t in before.items() if t.dim() < 2)
    assert moved < 1e-6


def test_a_step_does_not_depend_on_micro_batches(student, teacher):
    made = []
    for budget in (4096, 24):
        taught = engine(student, teacher, budget=budget, temperature=2.0, answer_weight=0.5)
        made.append((taught.sft_step(examples()).metrics, dict(taught.weights())))
    (one, weights), (other, others) = made
    assert one["learner/micro_batches"] < other["learner/micro_batches"]
    assert one["learner/loss"] == pytest.approx(other["learner/loss"], rel=1e-9)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-9, rtol=0)


def test_the_student_comes_closer_to_its_teacher(student, teacher):
    taught = engine(student, teacher, top_k=32)
    steps = [taught.sft_step(examples()).metrics[KL] for _ in range(20)]
    assert steps[-1] < 0.5 * steps[0]
