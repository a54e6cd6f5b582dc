"""The train engine under adapters: what trains, what travels, what is saved, in every kind."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.engines.lora import Adapters
from areal_ray.engines.lora_config import ADAPTER_FOLDER, LoraConfig, LoraSetup
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.preference import PairTask, PreferenceConfig, PreferencePair
from areal_ray.engines.sft import OfflineDistillationConfig, SftExample
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from areal_ray.errors import DataError
from tests.support.generation import Served, random_prompt, request
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

RANK_4 = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"))


def engine_of(folder, lora=RANK_4, *, dtype="float64", lr=0.01, seed=0, engine=None, **how):
    config = LearnerConfig(
        engine=TorchTrainConfig(dtype=dtype, **(engine or {})),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.0, eps=1e-4),
    )
    how["objective"] = how.get("objective") or ObjectiveConfig(kind="grpo")
    setup = None if lora is None else LoraSetup(config=lora, seed=seed)
    return TorchTrainEngine(folder, config, total_steps=4, lora=setup, **how)


def groups(count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [random_group(rng, n, rewards=[0.0, 1.0, 1.0, 0.0]) for n in range(count)]


def examples(count=4, seed=0):
    trajectories = [t for g in groups(count, seed) for t in g.trajectories[:1]]
    return [SftExample(t.token_ids, t.loss_mask) for t in trajectories]


def pairs(count=3, seed=0):
    made = examples(2 * count, seed)
    return [PreferencePair(*two) for two in zip(made[::2], made[1::2], strict=True)]


def preference():
    return PreferenceConfig(source="a:b", steps=1, batch_size=1)


def copies(engine):
    return {name: tensor.clone() for name, tensor in engine.weights().items()}


def reference(folder):
    return Companions(reference_path=str(folder))


KINDS = {
    "rl": ({}, lambda e, seed=0: e.train_step([groups(seed=seed)], 0)),
    "rl with a reference": (
        {
            "objective": {"kl": {"kl_ctl": 0.1, "estimator": "k2", "where": "loss"}},
            "reference": True,
        },
        lambda e, seed=0: e.train_step([groups(seed=seed)], 0),
    ),
    "sft": ({}, lambda e, seed=0: e.sft_step(examples(seed=seed))),
    "distill": ({"teacher": True}, lambda e, seed=0: e.sft_step(examples(seed=seed))),
    "dpo": ({"pairs": False, "reference": True}, lambda e, seed=0: e.pair_step(pairs(seed=seed))),
    "reward_model": ({"pairs": True}, lambda e, seed=0: e.pair_step(pairs(seed=seed))),
}


def engine_of_kind(kind, folder, teacher=None, **how):
    wants = KINDS[kind][0]
    if "objective" in wants:
        how["objective"] = ObjectiveConfig(kind="grpo", **wants["objective"])
    if "pairs" in wants:
        how["pairs"] = PairTask(preference(), is_scored=wants["pairs"])
    if "teacher" in wants:
        how["companions"] = Companions(teacher_path=str(teacher))
        how["distillation"] = OfflineDistillationConfig()
    if "reference" in wants:
        how["companions"] = reference(folder)
    return engine_of(folder, **how)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7)


# What trains and what travels


@pytest.mark.parametrize("kind", KINDS)
def test_in_every_kind_adapters_alone_train(kind, folder, teacher):
    engine = engine_of_kind(kind, folder, teacher)
    before = {name: t.detach().clone() for name, t in engine._model.named_parameters()}
    first = copies(engine)
    # The head of a new reward model is 0, and so is B: A moves from the third step on.
    stats = [KINDS[kind][1](engine, seed) for seed in range(3)]
    assert all(s.num_updates == 1 for s in stats)
    moved = {n for n, t in engine._model.named_parameters() if not torch.equal(t, before[n])}
    trained = {n for n, t in engine._model.named_parameters() if t.requires_grad}
    assert moved == trained
    heads = {"score.weight"} if kind == "reward_model" else set()
    assert {name for name in trained if ".lora_" not in name} == heads
    assert {name.replace(".default", "") for name in trained} == engine.weights().keys()
    assert all(not torch.equal(first[name], t) for name, t in engine.weights().items())


def test_names_and_shapes_are_those_that_the_generation_engine_asks_for(tmp_path):
    for family in ("qwen3", "llama", "gemma", "gpt2"):
        made = write_tiny_model(tmp_path / family, family)
        weights = engine_of(made, dtype="float32").weights()
        setup = LoraSetup(config=RANK_4)
        serving = TorchGenerationEngine(made, TorchGenerationConfig(), lora=setup)
        assert {n: tuple(t.shape) for n, t in weights.items()} == dict(serving.weight_shapes())


def test_every_rank_begins_with_the_same_adapters_and_another_seed_with_others(folder):
    one, other = engine_of(folder, seed=3).weights(), engine_of(folder, seed=3).weights()
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = engine_of(folder, seed=4).weights()
    assert not any(torch.equal(one[n], third[n]) for n in one if "lora_A" in n)
    assert all((third[n] == 0).all() for n in one if "lora_B" in n)


def test_what_it_samples_with_is_what_it_trains(folder):
    learner = engine_of(folder, dtype="float32")
    for seed in range(3):
        learner.train_step([groups(seed=seed)], 0)
    serving = TorchGenerationEngine(folder, TorchGenerationConfig(), lora=LoraSetup(config=RANK_4))
    serving.swap(learner.weights(), 1, "keep")
    served = Served(serving)
    serving.start(served.receive)
    prompt = random_prompt(1, 20)
    (result,) = served.run([request("a", prompt, seed=5, max_new_tokens=24)])
    serving.close()
    ids = torch.from_numpy(np.concatenate([prompt, result.token_ids]).astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(learner._model(ids[None]).logits[0, 19:-1], -1)
        plain = torch.log_softmax(
            load_causal_model(folder, TorchTrainConfig())(ids[None]).logits, -1
        )
    expected = table.gather(1, ids[20:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(result.logprobs), expected, atol=1e-5, rtol=0)
    assert (table - plain[0, 19:-1]).abs().max() > 0.01


def test_adapters_are_a_small_part_of_the_model(folder):
    learner = engine_of(folder)
    own = sum(t.numel() for t in learner.weights().values())
    assert own == 4 * sum(sum(t.shape) for n, t in learner._model.named_parameters()
                          if "base_layer.weight" in n)  # fmt: skip


def test_a_critic_beside_it_trains_whole(folder):
    objective = ObjectiveConfig(kind="ppo")
    companions = Companions(critic_path=str(folder), critic=CriticConfig())
    engine = engine_of(folder, objective=objective, companions=companions)
    before = {n: t.clone() for n, t in engine._critic._placed.weights().items()}
    for seed in range(2):
        engine.train_step([groups(seed=seed)], 0)
    after = engine._critic._placed.weights()
    assert not any("lora" in name for name in after)
    moved = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert {n for n in after if "layers" in n} <= moved
    assert all(".lora_" in name for name in engine.weights())


# The model without them


def test_the_reference_is_the_model_with_its_adapters_set_aside(folder, tmp_path):
    copied = write_tiny_model(tmp_path / "copy")  # the same weights, held twice
    objective = ObjectiveConfig(kind="grpo", kl={"kl_ctl": 0.1, "estimator": "k2", "where": "loss"})
    once = engine_of(folder, objective=objective, companions=reference(folder))
    twice = engine_of(folder, objective=objective, companions=reference(copied))
    assert once._rl._judge._reference.forward is once._forward
    for seed in range(3):
        metrics = [e.train_step([groups(seed=seed)], 0).metrics for e in (once, twice)]
        assert metrics[0]["learner/kl_reference_nats"] == pytest.approx(
            metrics[1]["learner/kl_reference_nats"], rel=1e-9
        )
    assert metrics[0]["learner/kl_reference_nats"] > 0
    for name, tensor in once.weights().items():
        torch.testing.assert_close(tensor, twice.weights()[name], rtol=1e-9, atol=1e-12)


def test_checkpointed_layers_are_computed_again_with_their_adapters(folder):
    """The reference is asked between a pair's forward and backward pass."""
    task = PairTask(preference(), is_scored=False)
    made = [
        engine_of(
            folder,
            dtype="float32",
            pairs=task,
            companions=reference(folder),
            engine={"gradient_checkpointing": again},
        )
        for again in (False, True)
    ]
    for seed in range(2):
        for engine in made:
            engine.pair_step(pairs(seed=seed))
    for name, tensor in made[0].weights().items():
        torch.testing.assert_close(tensor, made[1].weights()[name], rtol=1e-4, atol=1e-6)


# Checkpoints and exports


@pytest.mark.parametrize("kind", ["rl", "reward_model"])
def test_two_steps_resumed_for_two_more_are_four_steps(kind, folder, tmp_path):
    step = KINDS[kind][1]
    straight, first = (engine_of_kind(kind, folder) for _ in range(2))
    for seed in range(4):
        step(straight, seed)
    for seed in range(2):
        step(first, seed)
    first.save(tmp_path)
    second = engine_of_kind(kind, folder, seed=9)
    second.load(tmp_path)
    for seed in range(2, 4):
        step(second, seed)
    for name, tensor in straight.weights().items():
        torch.testing.assert_close(second.weights()[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_holds_adapters_alone(folder, tmp_path):
    engine_of(folder).save(tmp_path)
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "trainer_state.pt",
    }


def test_a_checkpoint_of_another_rank_or_of_all_weights_is_refused(folder, tmp_path):
    engine_of(folder).save(tmp_path)
    with pytest.raises(DataError, match=r"lora_A\.weight is \(4, .*must be \(8, .*model\.lora"):
        engine_of(folder, LoraConfig(rank=8)).load(tmp_path)
    some = LoraConfig(rank=4, target_modules=("q_proj",))
    with pytest.raises(DataError, match="must be no tensor under this recipe's"):
        engine_of(folder, some).load(tmp_path)
    engine_of(folder, None).save(tmp_path / "whole")
    with pytest.raises(DataError, match="holds no adapters that can be read"):
        engine_of(folder).load(tmp_path / "whole")


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gpt2"])
@pytest.mark.parametrize("targets", ["all-linear", ("c_attn", "q_proj", "v_proj")])
def test_an_export_is_a_plain_model_and_an_adapter_for_peft(family, targets, tmp_path):
    import peft

    fields = {"tie_word_embeddings": False} if family == "qwen2" else {}
    source = write_tiny_model(tmp_path / "source", family, **fields)
    if targets != "all-linear":
        targets = ("c_attn",) if family == "gpt2" else ("q_proj", "v_proj")
    learner = engine_of(source, LoraConfig(rank=4, target_modules=targets), dtype="float32")
    for seed in range(2):
        learner.train_step([groups(seed=seed)], 0)
    made = tmp_path / "made"
    learner.export(made)
    after = {n: t.clone() for n, t in learner.weights().items()}
    ids = torch.arange(4, 20)[None]
    merged = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in plain.named_parameters()}
    with torch.no_grad():
        unchanged = plain(ids).logits
        adapted = peft.PeftModel.from_pretrained(plain, made / ADAPTER_FOLDER).eval()
        expected = learner._model(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(adapted(ids).logits, expected, atol=1e-6, rtol=0)
    assert (expected - unchanged).abs().max() > 0.01
    assert AutoTokenizer.from_pretrained(made).chat_template
    said = json.loads((made / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["task_type"]) == (4, 32, "CAUSAL_LM")
    assert said["base_model_name_or_path"] == str(source)
    assert all("." not in target for target in said["target_modules"])
    assert all(torch.equal(t, after[n]) for n, t in learner.weights().items())


def test_an_exported_reward_model_has_its_head_in_both_forms(folder, tmp_path):
    import peft

    learner = engine_of_kind("reward_model", folder, dtype="float32")
    for seed in range(2):
        learner.pair_step(pairs(seed=seed))
    learner.export(tmp_path)
    ids = torch.arange(4, 20)[None]
    load = partial(
        AutoModelForSequenceClassification.from_pretrained, num_labels=1, dtype=torch.float32
    )
    merged, start = load(tmp_path).eval(), load(folder, pad_token_id=1).eval()
    adapted = peft.PeftModel.from_pretrained(start, tmp_path / ADAPTER_FOLDER).eval()
    with torch.no_grad():
        expected = learner._model(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(adapted(ids).logits, expected, atol=1e-5, rtol=0)
    assert float(expected.abs().max()) > 0


def test_setting_adapters_aside_is_over_when_it_is_left_by_an_error(folder):
    model = load_causal_model(folder, TorchTrainConfig())
    adapters = Adapters(model, LoraSetup(config=RANK_4))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.1)
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        within = model(ids).logits
        with pytest.raises(IndexError), adapters.set_aside():
            model(torch.full((1, 1), 10**6))
        with adapters.set_aside():
            assert not torch.equal(model(ids).logits, within)
        torch.testing.assert_close(model(ids).logits, within, rtol=0, atol=0)
