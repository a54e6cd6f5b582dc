"""Tensor parallelism inside FSDP: neighbouring ranks compute each layer together.

Which weight is cut how is said by the model's own plan in Transformers, whose layers also move the
data between ranks. FSDP then cuts each part again over the ranks with other data.
"""

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from areal_ray.engines.tensor_parts import Extent
from areal_ray.engines.tensor_styles import CUT, KEY, PARTIAL, tensor_styles
from areal_ray.errors import EngineError


class TensorPlan:
    """How the layers of one model are cut over the tensor ranks of a mesh (data, tensor)."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Read the model's plan.

        Raises:
            EngineError: It has none, or one with styles that are not covered here.
        """
        self.data_mesh, self._tensor = mesh["data"], mesh["tensor"]
        self._width = self._tensor.size()
        self._styles = _styles_of(module) if self._width > 1 else {}

    def cut(self, layer: nn.Module) -> None:
        """Leave this rank's part of a whole layer.

        Raises:
            EngineError: A width does not divide, or a layer is not the one that is planned for.
        """
        if self._width == 1:
            return
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        known = dict(layer.named_modules())
        planned = {n: style for n, style in self._styles.items() if n in known and style in CUT}
        for name, style in planned.items():
            linear = known[name]
            if not isinstance(linear, nn.Linear) or "weight" not in linear._parameters:
                raise EngineError(
                    f"{KEY}: {name} is a {type(linear).__name__}; must be a plain linear layer. "
                    "Adapters (model.lora) do not go with it."
                )
            extent = linear.weight.shape[0 if style == "colwise" else 1]
            heads = int(getattr(known.get("self_attn"), "head_dim", 1)) if "attn" in name else 1
            if extent % (self._width * heads):
                raise EngineError(
                    f"{KEY}: is {self._width}, and {name} has {extent // heads} heads or columns; "
                    "must divide them. Use another number."
                )
        apply_tensor_parallelism(layer, self._tensor, planned)

    def is_partial(self, name: str) -> bool:
        """Whether each tensor rank has a part of this parameter's gradient: they add up."""
        owner = name.rpartition(".")[0]
        return any(s == PARTIAL and owner.endswith(f".{n}") for n, s in self._styles.items())

    def sum_(self, gradient: Tensor) -> None:
        """Replace by the sum over tensor ranks."""
        dist.all_reduce(gradient, group=self._tensor.get_group())

    def copies(self, tensor: Tensor) -> int:
        """How many tensor ranks hold the same part of a parameter."""
        return 1 if self._cut_dimension(tensor) is not None else self._width

    def extent(self, tensor: Tensor) -> Extent:
        """What of a parameter this rank holds."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        rows, size = tensor.shape[0], math.prod(tensor.shape[1:])
        place, cut = self._tensor.get_local_rank(), self._cut_dimension(tensor)
        rows_here = rows // self._width if cut == 0 else rows
        width = -(-rows_here // self.data_mesh.size())
        first = min(width * self.data_mesh.get_local_rank(), rows_here)
        if cut == 1:
            columns = tensor.shape[1]
            start = first * columns + place * local.shape[1]
            return Extent(start, local.shape[1], local.shape[0], columns)
        first += place * rows_here if cut == 0 else 0
        return Extent(first * size, local.numel(), is_copy=cut is None and place > 0)

    @staticmethod
    def _cut_dimension(tensor: Tensor) -> int | None:
        if not isinstance(tensor, DTensor) or len(tensor.placements) == 1:
            return None
        place: Any = tensor.placements[1]
        return None if isinstance(place, Replicate) else int(place.dim) % tensor.dim()


def _styles_of(module: nn.Module) -> dict[str, str]:
    config = next((m.config for m in module.modules() if hasattr(m, "config")), None)
    if config is None:
        raise EngineError(f"{KEY}: {type(module).__name__} has no config; must be 1 with it.")
    return tensor_styles(config)
