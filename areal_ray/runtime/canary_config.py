"""What a recipe says about the check after each swap. Light to import: no Ray, no torch."""

from typing import Self

from pydantic import Field, model_validator

from areal_ray.core.config import Config


class CanaryConfig(Config):
    """What a replica has to prove after each swap before anything it samples leaves it."""

    tensors: bool = True
    """Each live tensor is, bit for bit, what arrived becomes in this engine. Engines that cannot
    read their weights back are held to the probe alone."""
    probe_tokens: int = Field(16, ge=0)
    """Length of a fixed prompt on whose log-probs engine and learner must agree; 0 = none."""
    logprob_tolerance: float | None = Field(None, gt=0.0)
    """By how many nats any of them may differ; null = 0.01 where both compute in float32, else 1:
    with fewer bits the tensors are what is checked sharply."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.probe_tokens == 1:
            raise ValueError(
                "probe_tokens: is 1; must be 0 or at least 2, as the first has no past"
            )
        if self.probe_tokens == 0 and self.logprob_tolerance is not None:
            raise ValueError(
                "logprob_tolerance: is set with probe_tokens 0, where nothing is compared; must "
                "be null. Remove it, or set probe_tokens."
            )
        return self
