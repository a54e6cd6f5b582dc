"""Linear weights of a CPU in the order that oneDNN's kernels read them.

Used by the lean forward; its room fills and proves them. At the few rows of a decode step a product
costs what reading the weight costs; torch's own kernel first copies a plain weight into such an
order, at each call and for more time than the product takes. Which weights are packed follows from
type, place and shape alone, so that all replicas of a kind round alike.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from areal_ray.core.buckets import digest
from areal_ray.engines.live_weights import is_same

_FEWEST_ELEMENTS = 2**19
"""2 MB. Smaller ones stay in a core's cache: a plain product is as fast and its call cheaper."""
_INPUT_ROWS = 16
"""That is packed for; the order is the same for any number above one."""
_BLOCK_ROWS = 64
"""Of the weight. They lie together, column by column."""
_SLICE_BYTES = 1024**2
"""What a core's cache holds, plain and packed."""


class PackedLinear:
    """A weight [out, in] in float32, held packed and in no other form.

    Packing goes by blocks of rows, so slices of rows are written in place. They are proven by two
    digests that each leaves, of the rows and of what was made of them: packing once more to compare
    takes several times as long. Where the rows' origin cannot have changed, the second is enough.
    """

    __slots__ = ("_cut", "_digests", "_memory", "_num_rows", "_origins", "_packed", "_row_bytes")

    def __init__(self, weight: Tensor, origin: object | None = None) -> None:
        """Pack this weight [out, in]; it may be overwritten afterwards. `origin` as in `write`."""
        weight = weight.contiguous()
        self._packed = _packed(weight)
        self._memory = _memory(self._packed)
        self._num_rows = len(weight)
        self._row_bytes = weight.shape[1] * weight.itemsize
        self._cut = _cut(*weight.shape)
        self._digests: dict[int, tuple[str, str]] = {}
        self._origins: dict[int, object | None] = {}
        for first_row in range(0, len(weight), self.slice_rows):
            rows = weight[first_row : first_row + self.slice_rows]
            self._digests[first_row] = _digest(rows), _digest(self._part(first_row, len(rows)))
            self._origins[first_row] = origin

    @property
    def slice_rows(self) -> int:
        """Of a slice; the last one is what is left."""
        return self._cut.slice_rows

    @property
    def address(self) -> int:
        """Of the memory that products read."""
        return self._memory.data_ptr()

    def write(self, first_row: int, rows: Tensor, origin: object | None = None) -> None:
        """Hold these rows [slice_rows, in] from now on, from a multiple of as many on.

        `origin`: Stands for what they were made from, which does not change; None = nothing does.
        """
        rows = rows.contiguous()
        given = _digest(rows)
        if self._cut.is_transposed and len(rows) % _BLOCK_ROWS == 0:
            packed = _transposed(rows)
        else:
            made = _packed(rows)  # kept as long as its memory is read
            packed = _memory(made)
        self._digests.pop(first_row, None)
        self._part(first_row, len(rows)).copy_(packed)
        self._digests[first_row] = given, _digest(packed)
        self._origins[first_row] = origin

    def is_of(self, first_row: int, num_rows: int, origin: object) -> bool:
        """Whether these rows were last made from that, and products read what was made of them."""
        if self._origins.get(first_row) is not origin or first_row not in self._digests:
            return False
        return self._digests[first_row][1] == _digest(self._part(first_row, num_rows))

    def holds(self, first_row: int, rows: Tensor) -> bool:
        """Whether these are what was written last, and products read what was made of it."""
        part = self._part(first_row, len(rows))
        return self._digests.get(first_row) == (_digest(rows.contiguous()), _digest(part))

    def _part(self, first_row: int, num_rows: int) -> Tensor:
        """[num_bytes] that products read of these rows; the last one ends with padding."""
        start = first_row * self._row_bytes
        is_last = first_row + num_rows == self._num_rows
        return self._memory[start : None if is_last else start + num_rows * self._row_bytes]

    def plain(self) -> Tensor:
        """[out, in] what the products read, unpacked into memory of its own."""
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
    """Whether this build of torch packs, always alike, and unpacks and computes with it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.arange(70.0 * 48).reshape(70, 48) % 7
    x = torch.arange(3.0 * 48).reshape(3, 48) % 5
    try:
        with torch.inference_mode():
            made = PackedLinear(weight)
            is_held = made.holds(0, weight) and torch.equal(made.plain(), weight)
            return is_held and torch.equal(made(x, None), functional.linear(x, weight))
    except (AttributeError, RuntimeError):  # another build of torch may lack the operations
        return False


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a weight of some shape is packed piece by piece."""

    slice_rows: int
    is_transposed: bool
    """Whether slices of whole blocks of rows may be packed by `_transposed`."""


@cache
def _cut(num_out: int, num_in: int) -> _Cut:
    """Of a weight of this shape: some blocks, or all where a build's order is not by such blocks.

    Takes memory for two such weights meanwhile.
    """
    row_bytes = 4 * num_in
    rows = max(1, _SLICE_BYTES // row_bytes // _BLOCK_ROWS) * _BLOCK_ROWS
    numbers = torch.arange(2**29, 2**29 + num_out * num_in, dtype=torch.int32)
    weight = numbers.view(torch.float32).view(num_out, num_in)  # no two alike
    packed = _packed(weight)
    slices = [(i * row_bytes, weight[i : i + rows]) for i in range(0, num_out, rows)]
    whole = [(start, part) for start, part in slices if len(part) % _BLOCK_ROWS == 0]
    if not all(_is_within(_memory(packed), start, _packed(part)) for start, part in slices):
        return _Cut(num_out, is_transposed=False)
    memory = _memory(packed)
    is_transposed = all(
        is_same(memory[start : start + part.nbytes], _transposed(part)) for start, part in whole
    )
    return _Cut(rows, is_transposed)


def _transposed(rows: Tensor) -> Tensor:
    """[num_bytes] of whole blocks of rows, each block column by column: oneDNN's order, as a rule.

    The channels of a block are its rows one after the other; shuffled in as many groups as it has
    rows, they lie column by column. Four times as fast as oneDNN's own reordering.
    """
    num_blocks, length = len(rows) // _BLOCK_ROWS, _BLOCK_ROWS * rows.shape[1]
    channels = rows.view(1, num_blocks, 1, length).permute(0, 3, 1, 2)
    shuffled = functional.channel_shuffle(channels, _BLOCK_ROWS)
    return shuffled.permute(0, 2, 3, 1).reshape(-1).view(torch.uint8)


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _INPUT_ROWS)
    return packed


def _num_bytes(packed: Tensor) -> int:
    size: int = torch.ops.mkldnn._nbytes(packed)
    return size


def _memory(packed: Tensor) -> Tensor:
    """[num_bytes] view, good as long as what is packed."""
    place = ctypes.c_uint8 * _num_bytes(packed)
    return torch.frombuffer(
        place.from_address(torch.ops.mkldnn.data_ptr(packed)), dtype=torch.uint8
    )


def _digest(tensor: Tensor) -> str:
    """Of contiguous memory."""
    return digest(tensor.detach().view(torch.uint8).reshape(-1).numpy())


def _is_within(memory: Tensor, start: int, packed: Tensor) -> bool:
    return is_same(memory[start : start + _num_bytes(packed)], _memory(packed))
