"""What a forward pass makes of new weights, made while these arrive.

To join, multiply and pack them costs a CPU as much time as the bytes take. Nothing of it is live
before the swap, or at all where the version is discarded.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from areal_ray.engines.cached_model import Forward
from areal_ray.engines.lean_forward import LeanForward


class MadeAhead:
    """What a forward pass makes of weights, before the swap to them where that pays.

    Not for use by two threads at once.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._made: tuple[Mapping[str, Tensor], Any] | None = None

    def make(self, tensors: Mapping[str, Tensor]) -> None:
        """Make them now for a later `take`; may wait for tensors that are still arriving.

        Raises:
            Abandoned: They do not arrive.
        """
        self.forget()
        if isinstance(self._forward, LeanForward) and self._forward.makes_ahead:
            self._made = tensors, self._forward.prepare(tensors)

    def take(self, tensors: Mapping[str, Tensor]) -> Any:
        """What was made of these very tensors, or is made now."""
        if self._made is not None and self._made[0] is tensors:
            made, self._made = self._made[1], None
            return made
        self.forget()
        return self._forward.prepare(tensors)

    def forget(self) -> None:
        """Give the memory of what nobody took to the next ones."""
        made, self._made = self._made, None
        if made is not None and isinstance(self._forward, LeanForward):
            self._forward.reuse(made[1])
