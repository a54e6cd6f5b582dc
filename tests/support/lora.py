"""Adapters with something in them, for tests: fresh ones change nothing."""

from collections.abc import Mapping

import torch


def random_adapters(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, size: float = 0.1
) -> dict[str, torch.Tensor]:
    """Tensors of these names and shapes, drawn from a normal distribution of this spread."""
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
