"""DeepSpeed's own configuration against the recipe's; none of it needs deepspeed."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from areal_ray.engines import deepspeed_settings
from areal_ray.engines.deepspeed_settings import reports, settings
from areal_ray.engines.train_config import DeepspeedConfig, LearnerConfig, OptimizerConfig
from areal_ray.errors import RecipeError
from areal_ray.preflight import check_files
from areal_ray.recipe import parse_recipe

TEXT = """\
kind: rl
name: sums-{seed}
steps: 40
model: {path: "{fileroot}/warm-{seed}/model", create: warm.yaml}
tasks: {source: "recipes.sums.tasks:train"}
reward: {score: "areal_ray.rewards.math:score"}
admission: {groups_per_step: 32}
rollout: {sampling: {max_new_tokens: 24}}
"""


def told(config, **engine):
    with pytest.raises(ValidationError) as caught:
        DeepspeedConfig(config=config, **engine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_micro_batch_size_per_gpu: is 8; a step is cut into passes of at most "
            "max_tokens_per_mb = 8192 tokens",
        ),
        ({"zero_optimization": {"stage": 3}}, "stage: is 3, zero_stage is 2; must be the same"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: is true; dtype is float32"),
        ({"fp16": {"enabled": True}}, "and set dtype=bfloat16 if that is meant"),
        ({"prescale_gradients": True}, "prescale_gradients: is True"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device: is cpu; offload is none, which makes it none; must be the "
            "same. Set offload=optimizer",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "Only cpu is supported",
        ),
        ({"zero_optimisation": {}}, "nothing reads it here; must be taken out. Did you mean"),
        ({"zero_optimization": {"reduce_buckets": 1}}, "Did you mean 'reduce_bucket_size'?"),
        ({"zero_optimization": 3}, "zero_optimization: is 3; must be a section"),
        ({"tensorboard": {"enabled": True}}, "config.tensorboard: nothing reads it here"),
    ],
)
def test_what_contradicts_the_engine_or_is_read_by_nothing_is_refused(config, message):
    assert message in told(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_clipping": 0.5},
            "config.gradient_clipping: is 0.5, learner.optimizer.gradient_clipping is 1.0; must be "
            "the same. Set learner.optimizer.gradient_clipping=0.5, or take the key out.",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}},
            "config.optimizer.params.lr: is 0.001, learner.optimizer.lr is 1e-05",
        ),
        ({"optimizer": {"type": "Lamb"}}, "config.optimizer.type: is Lamb; must be AdamW"),
        ({"optimizer": {"params": {"torch_adam": True}}}, "nothing reads it here"),
        ({"scheduler": {"type": "WarmupLR"}}, "lr_scheduler_type is constant after 0"),
    ],
)
def test_what_contradicts_the_optimizer_is_refused(config, message):
    with pytest.raises(ValidationError) as caught:
        LearnerConfig(engine=DeepspeedConfig(config=config))
    assert message in str(caught.value)


def test_a_file_as_transformers_writes_it_is_taken():
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none"},
        },
    }
    engine = DeepspeedConfig(zero_stage=3, offload="optimizer", config=config)
    LearnerConfig(engine=engine)
    given = settings(engine.config, engine.keys, gradient_clipping=0.7)
    assert given["gradient_clipping"] == 0.7
    assert given["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert "optimizer" not in given
    assert "auto" not in str(given)


def test_a_frozen_model_has_no_optimizer_to_offload():
    engine = DeepspeedConfig(zero_stage=3, offload="all")
    zero = settings(engine.config, engine.keys, gradient_clipping=0.0)["zero_optimization"]
    assert set(zero) == {"stage", "offload_param"}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"zero_stage": 2, "offload": "all"}, "Set zero_stage=3"),
        ({"zero_stage": 0, "offload": "optimizer"}, "Set zero_stage to 1, 2 or 3"),
        ({"zero_stage": 1, "config": {"zero_optimization": {"overlap_comm": True}}}, "once a step"),
    ],
)
def test_a_stage_must_split_what_is_offloaded(engine, message):
    assert message in told(**{"config": {}, **engine})


def test_a_recipe_names_the_key():
    overrides = [
        "learner.engine.kind=deepspeed",
        "learner.engine.zero_stage=1",
        "learner.engine.config.gradient_clipping=0.25",
    ]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(TEXT, overrides)
    assert "learner.engine.config.gradient_clipping: is 0.25" in str(caught.value)


@dataclass
class Installed:
    found: str | None

    def version(self, name):
        if self.found is None:
            raise deepspeed_settings.metadata.PackageNotFoundError(name)
        return self.found


def test_the_package_must_be_one_that_was_tried():
    assert "is not installed" in deepspeed_settings.deepspeed_problem(Installed(None).version)
    assert "deepspeed is 0.18.2" in deepspeed_settings.deepspeed_problem(
        Installed("0.18.2").version
    )
    assert "deepspeed is 0.20.0" in deepspeed_settings.deepspeed_problem(
        Installed("0.20.0").version
    )
    assert deepspeed_settings.deepspeed_problem(Installed("0.19.12+cpu").version) is None


def test_preflight_tells_what_is_wrong_with_the_package():
    told = check_files(parse_recipe(TEXT, ["learner.engine.kind=deepspeed"]))
    problem = deepspeed_settings.deepspeed_problem()
    assert (f"learner.engine.kind: {problem}" in told) == (problem is not None)
    assert not [line for line in check_files(parse_recipe(TEXT)) if "package deepspeed" in line]


def test_deepspeed_logs_only_where_it_is_asked_for_a_report():
    assert not reports({"zero_optimization": {"stage": 2}, "steps_per_print": "auto"})
    assert reports({"comms_logger": {"enabled": True}})


def test_nothing_else_imports_deepspeed():
    code = (
        "import sys, areal_ray.recipe, areal_ray.engines.torch_train, areal_ray.preflight;"
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defaults_agree():
    engine = DeepspeedConfig()
    assert (engine.zero_stage, engine.offload) == (2, "none")
    LearnerConfig(engine=engine, optimizer=OptimizerConfig())
