"""Linear weights of a CPU in the order that oneDNN's kernels read them.

Used by the lean forward. At the few rows of a decode step a product costs what reading the weight
costs; torch's own kernel first copies a plain weight into such an order, at each call and for more
time than the product takes. Which weights are packed follows from type, place and shape alone, so
that all replicas of a kind round alike.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_FEWEST_ELEMENTS = 2**19
"""2 MB. Smaller ones stay in a core's cache: a plain product is as fast and its call cheaper."""
_ROWS = 16
"""Of the input that is packed for; the order is the same for any number above one."""


class PackedLinear:
    """A weight [out, in] in float32, held packed and in no other form."""

    __slots__ = ("_packed",)

    def __init__(self, weight: Tensor) -> None:
        self.write(weight)

    def write(self, weight: Tensor) -> None:
        """Hold this weight [out, in] from now on; it may be overwritten once this returns."""
        self._packed: Tensor | None = None  # whose memory is taken again
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)

    def plain(self) -> Tensor:
        """[out, in] bit for bit what the products read, unpacked into memory of its own."""
        assert self._packed is not None
        return self._packed.to_dense()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[t, out] of [t, in]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, bias, "none", [], ""
        )
        return product


LinearWeight = Tensor | PackedLinear
"""[out, in], except where a plain one is said to be [in, out]."""


def is_packed(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a weight of this shape is worth packing, and can be."""
    if dtype != torch.float32 or device.type != "cpu":
        return False
    return num_out * num_in >= _FEWEST_ELEMENTS and _is_supported()


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """[t, out] = x @ weight.T + bias."""
    if isinstance(weight, PackedLinear):
        return weight(x, bias)
    return functional.linear(x, weight, bias)


def add_linear(x: Tensor, y: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """[t, out] = x + y @ weight + bias, one op without a bias; a plain weight is [in, out]."""
    if isinstance(weight, PackedLinear):
        return weight(y, bias).add_(x)
    added: Tensor = torch.addmm(x, y, weight)
    return added if bias is None else added.add_(bias)


@cache
def _is_supported() -> bool:
    """Whether this build of torch packs, unpacks to the same bits and computes with the result."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.arange(64.0 * 48).reshape(64, 48) % 7
    x = torch.arange(3.0 * 48).reshape(3, 48) % 5
    try:
        with torch.inference_mode():
            made = PackedLinear(weight)
            is_same = torch.equal(made.plain(), weight)
            return is_same and torch.equal(made(x, None), functional.linear(x, weight))
    except (AttributeError, RuntimeError):  # another build of torch may lack the operations
        return False
