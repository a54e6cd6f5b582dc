"""Configuration of the learner; without torch, so that a recipe is checked before it loads."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from areal_ray.core.config import Config, UserPath
from areal_ray.engines.deepspeed_settings import EngineKeys, engine_problems, optimizer_problems


class OptimizerConfig(Config):
    """AdamW, its schedule and gradient clipping."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw: torch's, fused. adamw_8bit: moments in 8 bits (bitsandbytes), for
    learner.engine.kind torch with device cuda."""
    lr: float = Field(1e-5, gt=0.0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0.0)
    """Decoupled; on matrices only, not on norms and biases."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly; a step's minibatches share one rate."""
    gradient_clipping: float = Field(1.0, gt=0.0)
    """Largest L2 norm of the whole gradient."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas: is {list(self.betas)}; both must be in [0, 1).")
        return self


class TrainEngineConfig(Config):
    """What every kind of train engine is told."""

    kind: str
    """Which one: a Literal in each kind."""
    max_tokens_per_mb: int = Field(8192, ge=1)
    """Tokens of one forward pass, padding included. A longer sequence goes alone."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of a rank's arithmetic."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the forward pass. bfloat16 keeps float32 weights and optimizer state (autocast).
    float64 is for checking numbers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where a rank computes; cuda = the one GPU the rank can see."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    share_prefixes: bool = True
    """Compute the prompt that a group's episodes have in common once."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """auto: sequences end to end without padding, by flash-attn where it can run, else by SDPA;
    padded where a model cannot read them so, or one is longer than its attention's window.
    flash: by flash-attn (on cuda in bfloat16), which computes shared prompts for each. sdpa:
    padded."""
    collective_timeout_s: float = Field(600.0, gt=0.0)
    """How long a rank waits for the others in one exchange."""

    @property
    def ranks_per_share(self) -> int:
        """Neighbouring ranks that compute the same share of the data together."""
        return 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gradient_checkpointing and self.dtype == "float64":
            raise ValueError(
                "gradient_checkpointing: is true with dtype 'float64', which is for checking "
                "small models; must be false. Change either."
            )
        if self.attention == "flash" and (self.device, self.dtype) != ("cuda", "bfloat16"):
            raise ValueError(
                f"attention: is flash with device {self.device} and dtype {self.dtype}; must be "
                "sdpa or auto there. Use it with device cuda and dtype bfloat16."
            )
        return self


class TorchTrainConfig(TrainEngineConfig):
    """The train engine on plain torch: data parallel, each rank holds the whole model."""

    kind: Literal["torch"] = "torch"
    """Which train engine."""


class FsdpConfig(TrainEngineConfig):
    """The train engine with FSDP2: each rank holds a part of every parameter and moment."""

    kind: Literal["fsdp"] = "fsdp"
    """Which train engine."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the forward pass. bfloat16 keeps float32 parts and optimizer state, and gathers and
    computes layers in bfloat16. float64 is for checking numbers."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of gradients as they are summed over ranks, with dtype bfloat16."""
    reshard_after_forward: bool = True
    """Free a layer's parameters between its forward and backward pass: less memory, gathered
    twice."""
    tensor_parallel: int = Field(1, ge=1)
    """Neighbouring ranks that compute each layer together, by the plan that Transformers has for
    the model: its attention heads and widths must divide by it."""
    sequence_parallel: int = Field(1, ge=1)
    """Neighbouring ranks that compute each pass together, each on its slice of the tokens
    (Ulysses): for sequences whose activations one rank cannot hold. The model's attention heads and
    key-value heads must divide by it."""
    cpu_offload: bool = False
    """Keep parts and optimizer state in host memory and update there; with device cuda."""

    @property
    def ranks_per_share(self) -> int:
        """See `TrainEngineConfig`."""
        return self.tensor_parallel * self.sequence_parallel

    @model_validator(mode="after")
    def _check_fsdp(self) -> Self:
        if self.sequence_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"sequence_parallel: is {self.sequence_parallel} with tensor_parallel "
                f"{self.tensor_parallel}; one of the two must be 1. Change either."
            )
        if self.sequence_parallel > 1 and self.attention != "auto":
            raise ValueError(
                f"sequence_parallel: is {self.sequence_parallel} with attention {self.attention}; "
                "must be 1 then. Set attention=auto."
            )
        if self.cpu_offload and self.device == "cpu":
            raise ValueError(
                "cpu_offload: is true with device cpu, where all is in host memory already; must "
                "be false. Change either."
            )
        if self.reduce_dtype != "float32" and self.dtype != "bfloat16":
            raise ValueError(
                f"reduce_dtype: is {self.reduce_dtype} with dtype {self.dtype}; must be float32. "
                "Change either."
            )
        return self


class DeepspeedConfig(TrainEngineConfig):
    """The train engine on DeepSpeed: ZeRO lays optimizer, gradient and weights over the ranks."""

    kind: Literal["deepspeed"] = "deepspeed"
    """Which train engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass. bfloat16 keeps float32 weights and optimizer state (autocast)."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What a rank holds its share of instead of the whole: 1 the optimizer state, 2 the gradient
    too, 3 the weights too (also those of critic, reference and teacher). 0 = of nothing."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in host memory: the optimizer's state, which is updated there; all = the weights
    too (zero_stage 3)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's own configuration, passed on: zero_optimization (bucket sizes, thresholds),
    comms_logger, flops_profiler. A key with the meaning of another one of the recipe must agree
    with it, or be auto."""

    @model_validator(mode="after")
    def _check_config(self) -> Self:
        problems = engine_problems(self.config, self.keys)
        if self.offload == "all" and self.zero_stage != 3:
            problems.append(
                f"offload: is all with zero_stage {self.zero_stage}, which keeps the weights "
                "whole on each rank; must be none or optimizer. Set zero_stage=3, or offload."
            )
        elif self.offload != "none" and self.zero_stage == 0:
            problems.append(
                f"offload: is {self.offload} with zero_stage 0, which leaves all where it is; "
                "must be none. Set zero_stage to 1, 2 or 3, or offload=none."
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def keys(self) -> EngineKeys:
        """What DeepSpeed has a word for."""
        return EngineKeys(
            self.zero_stage, self.offload, self.dtype, self.device, self.max_tokens_per_mb
        )


AnyTrainConfig = TorchTrainConfig | FsdpConfig | DeepspeedConfig
"""What `learner.engine` may be, told apart by `kind`."""


class LearnerConfig(Config):
    """The training side of a run."""

    ranks: int = Field(1, ge=1)
    """Data-parallel processes. Any number takes the same steps from the same groups."""
    engine: AnyTrainConfig = TorchTrainConfig()
    """What computes."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """What updates."""
    ppo_n_minibatches: int = Field(1, ge=1)
    """Optimizer updates a step; each takes its own share of the step's groups."""
    num_cpus: float = Field(0.2, ge=0.0)
    """CPUs that Ray reserves for each rank."""
    num_gpus: float = Field(0.0, ge=0.0)
    """GPUs that Ray reserves for each rank."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        together = self.engine.ranks_per_share
        if self.ranks % together:
            is_tensor = getattr(self.engine, "tensor_parallel", 1) > 1
            key = "tensor_parallel" if is_tensor else "sequence_parallel"
            raise ValueError(
                f"ranks: is {self.ranks} with engine.{key} {together}; must be a multiple of it. "
                "Change either."
            )
        kind, device = self.engine.kind, self.engine.device
        if self.optimizer.name == "adamw_8bit" and (kind, device) != ("torch", "cuda"):
            raise ValueError(
                f"optimizer.name: is adamw_8bit with engine.kind {kind} and device {device}; must "
                "be adamw there. Use it with kind torch on device cuda."
            )
        if isinstance(self.engine, DeepspeedConfig):
            problems = optimizer_problems(self.engine.config, self.optimizer.model_dump())
            if problems:
                raise ValueError("\n".join(f"engine.{problem}" for problem in problems))
        return self


class CriticConfig(Config):
    """The model that says what reward to expect from each token on (PPO)."""

    path: UserPath | None = Field(None, min_length=1)
    """Folder or hub name of the body it starts from; null = model.path. Its head starts at 0."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """What updates it, once for each minibatch."""
    eps_clip: float | None = Field(0.5, gt=0.0)
    """A value moves at most so far from the one at the start of the step; null = freely."""


class ReferenceConfig(Config):
    """The model that objective.kl holds the policy near; it never changes."""

    path: UserPath | None = Field(None, min_length=1)
    """Folder or hub name; null = model.path."""


class TeacherConfig(Config):
    """The model that objective.distillation learns from; it never changes."""

    path: UserPath = Field(min_length=1)
    """Folder or hub name; it must share the vocabulary of model.path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The models beside the policy on each rank; an empty path = none."""

    reference_path: str = ""
    teacher_path: str = ""
    critic_path: str = ""
    critic: CriticConfig = field(default_factory=CriticConfig)
