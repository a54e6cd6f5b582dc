"""The memory of a packed weight, for faults in the very bytes that products read."""

import ctypes

import torch

from areal_ray.engines.packed_linear import PackedLinear


def flip_a_bit(weight: PackedLinear, place: int = 1000) -> None:
    """Change one float in place, by its second highest bit of the mantissa."""
    packed = weight._packed
    address = torch.ops.mkldnn.data_ptr(packed)
    cell = ctypes.c_uint32.from_address(address + 4 * place)
    cell.value ^= 1 << 21
