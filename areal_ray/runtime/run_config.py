"""What a recipe says about the run as a whole. Light to import: no Ray, no torch."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_ray.agents.task_stream import TasksConfig
from areal_ray.core.config import Config, UserPath
from areal_ray.engines.lora_config import LoraConfig
from areal_ray.engines.protocols import SamplingConfig

_GROUPS_S = 1800.0


def is_hub_name(path: str) -> bool:
    """Whether it has the form `owner/name` of the Hugging Face hub."""
    return re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", path) is not None


class ModelConfig(Config):
    """The model that is sampled from and trained."""

    path: UserPath = Field(min_length=1)
    """Folder with a Hugging Face checkpoint, or a hub name such as Qwen/Qwen2.5-1.5B-Instruct.
    `{seed}` stands for the recipe's seed, `{fileroot}` for cluster.fileroot."""
    create: str | None = None
    """Makes the model where the folder of `path` is missing: a recipe (a .yaml file) whose run
    leaves it there, or a `package.module:function` called with (folder, seed)."""
    lora: LoraConfig | None = None
    """Adapters that train in place of all weights, and alone travel to the rollouts; null = all
    weights train."""

    @property
    def is_created_by_recipe(self) -> bool:
        """Whether `create` names another recipe."""
        return self.create is not None and self.create.endswith((".yaml", ".yml"))

    @property
    def may_be_hub_name(self) -> bool:
        """Whether `path` has the form `owner/name` of the Hugging Face hub."""
        return is_hub_name(self.path)


class EvaluationConfig(Config):
    """Held-out tasks, scored beside training under a committed version.

    What is not given here is inherited: agent and reward from the run, and of the sampling
    max_new_tokens, stop_token_ids and stop from rollout.sampling; the rest of it is greedy.
    """

    tasks: TasksConfig
    """Held-out tasks; nothing is inherited from the training tasks."""
    every_steps: int = Field(0, ge=0)
    """Evaluate after every so many steps, and after the last. 0 = after the last only."""
    before: bool = True
    """Also evaluate the initial weights."""
    n_samples: int = Field(1, ge=1)
    """Episodes a task. Above 1, accuracy is their mean and pass@n is reported too."""
    sampling: SamplingConfig | None = None
    """null = greedy, with the limits of rollout.sampling."""
    max_concurrent_tasks: int = Field(128, ge=1)
    """Tasks attempted at once."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        greedy = self.sampling is None or self.sampling.temperature == 0
        if self.n_samples > 1 and greedy:
            raise ValueError(
                f"n_samples: is {self.n_samples} with greedy sampling, where all samples are "
                "alike; must be 1. Set sampling.temperature above 0, or n_samples to 1"
            )
        return self

    def sampling_for(self, training: SamplingConfig) -> SamplingConfig:
        """How an evaluation samples, given how training does."""
        if self.sampling is not None:
            return self.sampling
        return SamplingConfig(
            temperature=0.0,
            max_new_tokens=training.max_new_tokens,
            stop_token_ids=training.stop_token_ids,
            stop=training.stop,
        )

    def described(self, training: SamplingConfig) -> str:
        """What it does, inherited values included, on one line."""
        sampling = self.sampling_for(training)
        how = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
        when = f"every {self.every_steps} steps" if self.every_steps else "at the end"
        return (
            f"{self.n_samples} a task, {how}, at most {sampling.max_new_tokens} tokens a turn, "
            f"{when}"
        )


class ClusterConfig(Config):
    """Where the run lives, and what it may count on there."""

    n_nodes: int = Field(1, ge=1)
    """Nodes the run waits for before it starts."""
    n_gpus_per_node: int = Field(0, ge=0)
    """GPUs that each of these nodes has for the run."""
    fileroot: UserPath = "runs"
    """Folder of the run folders; on several nodes it must be shared between them."""
    address: str | None = None
    """Of a running Ray cluster ("auto" finds the one on this machine). null = RAY_ADDRESS if that
    is set, else as scheduler.type says."""
    num_cpus: int | None = Field(None, ge=1)
    """CPUs of a Ray that is started here. null = as many as the machine has."""
    object_store_bytes: int = Field(512 * 1024**2, ge=80 * 1024**2)
    """Object store of a Ray that is started here."""


class SchedulerConfig(Config):
    """What places the actors."""

    type: Literal["local", "ray"] = "local"
    """local: start a Ray on this machine for the run, unless an address is given.
    ray: join a running cluster, and never start one."""


class DeadlinesConfig(Config):
    """How long the run waits before it gives up and says for what."""

    nodes_s: float = Field(300.0, gt=0.0)
    """For the nodes of the cluster to be there."""
    placement_s: float = Field(120.0, gt=0.0)
    """For the placement groups."""
    model_s: float = Field(3600.0, gt=0.0)
    """For another run that makes the same model."""
    start_s: float = Field(600.0, gt=0.0)
    """For an actor to load its engine."""
    groups_s: float | None = Field(None, gt=0.0)
    """For the groups of one step. null = 1800; in kind online, whose agents may call tomorrow, as
    long as it takes."""
    step_s: float = Field(3600.0, gt=0.0)
    """For one learner step."""

    def groups_limit_s(self, *, is_online: bool) -> float | None:
        """For the groups of one step, in seconds; None = as long as it takes."""
        if self.groups_s is None and not is_online:
            return _GROUPS_S
        return self.groups_s
