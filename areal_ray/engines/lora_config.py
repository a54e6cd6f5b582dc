"""What a recipe says about LoRA, and which layers that means; without torch and peft."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from areal_ray.core.config import Config
from areal_ray.errors import RecipeError

ADAPTER_FOLDER = "adapter"
"""Inside a checkpoint or an exported model: what peft and vLLM load as an adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
LARGEST_RANKS = {"torch": None, "vllm": 512}
"""Of the generation engines that take adapters, by kind; None = any."""

_NO_LAYERS = ("embed", "wte", "wpe", "lm_head", "score")
"""In names of matrices that are not linear layers of the body."""
_LAYERS_SHOWN = 12


class LoraConfig(Config):
    """Low-rank adapters in place of all weights (LoRA, arXiv:2106.09685)."""

    rank: int = Field(16, ge=1)
    """r: each adapted matrix W becomes W + scale * B A, with A of r rows and B of r columns."""
    alpha: int = Field(32, ge=1)
    """The scale is alpha / rank."""
    rslora: bool = False
    """The scale is alpha / sqrt(rank) instead, for large ranks (arXiv:2312.03732)."""
    target_modules: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = (
        "all-linear"
    )
    """Names of the layers that get adapters, as [q_proj, v_proj]: whole names, or how they end
    after a dot. all-linear = every linear layer but the output head."""
    dropout: float = Field(0.0, ge=0.0)
    """Must be 0: with dropout the policy that is trained would not be the one that sampled."""

    @field_validator("dropout")
    @classmethod
    def _check_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"is {dropout:g}; must be 0, since with dropout the policy that is trained would "
                "not be the one that sampled. Remove it"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _check_targets(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("is empty; must name layers, or be all-linear. Name some")
        return targets

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def described(self) -> str:
        """What it is, on one line."""
        targets = self.target_modules
        named = targets if isinstance(targets, str) else ", ".join(targets)
        return f"rank {self.rank}, scale {self.scale:g}, {named}"

    def endings(self, layers: Iterable[str]) -> list[str]:
        """What peft and vLLM are told of the adapted layers: names as given, or how they end."""
        targets = self.target_modules
        if isinstance(targets, str):
            return sorted({name.rpartition(".")[2] for name in layers})
        return list(targets)

    def adapted(self, layers: Iterable[str]) -> list[str]:
        """The layers that get adapters, in the order given.

        Args:
            layers: Full names of the model's linear layers.

        Raises:
            RecipeError: A target is none of them, or there are none.
        """
        named = list(layers)
        targets = self.target_modules
        if not named or isinstance(targets, str):
            if not named:
                raise RecipeError(
                    "model.lora: the model has no linear layer that could be adapted. Remove it."
                )
            return named
        lost = [target for target in targets if not any(_is_named(n, target) for n in named)]
        if lost:
            known = sorted({name.rpartition(".")[2] for name in named})
            shown = ", ".join(known[:_LAYERS_SHOWN]) + (", ..." if known[_LAYERS_SHOWN:] else "")
            raise RecipeError(
                f"model.lora.target_modules: {', '.join(lost)} is no linear layer of the model; "
                f"must be of {shown}, or {ALL_LINEAR}. Choose from these."
            )
        return [name for name in named if any(_is_named(name, target) for target in targets)]


def engine_problems(config: LoraConfig, kind: str) -> Iterator[str]:
    """Why a generation engine of this kind cannot take the adapters; empty if it can."""
    if kind not in LARGEST_RANKS:
        known = " or ".join(LARGEST_RANKS)
        yield (
            f"rollout.engine.kind: is {kind} with model.lora; must be {known}, since others take "
            "whole weights only. Change it, or remove model.lora."
        )
        return
    largest = LARGEST_RANKS[kind]
    if largest is not None and config.rank > largest:
        yield (
            f"model.lora.rank: is {config.rank}; must be <= {largest} with rollout.engine.kind "
            f"{kind}. Lower it, or use another engine."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSetup:
    """What an engine with adapters is built from."""

    config: LoraConfig
    seed: int = 0
    """Of the adapters' first values (A; B begins at 0, so that nothing is changed yet)."""
    folder: str = ""
    """Checkpoint whose adapters to begin with; empty = fresh ones."""


def layers_in(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the linear layers among a checkpoint's tensors, by names and shapes alone."""
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight")
        and len(shape) == 2
        and not any(part in name for part in _NO_LAYERS)
    ]


def _is_named(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
