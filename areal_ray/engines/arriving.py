"""Tensors that are still arriving: a staged version comes bucket after bucket."""

import threading
from collections.abc import Iterator, Mapping

from torch import Tensor


class Abandoned(Exception):
    """What was asked for will not arrive."""


class ArrivingTensors(Mapping[str, Tensor]):
    """Tensors by name in a buffer that is filled from front to back.

    Asking for one waits until its last byte is there. Once all are, it is like any other mapping.
    """

    def __init__(self, views: Mapping[str, Tensor], ends: Mapping[str, int]) -> None:
        """Nothing has arrived.

        Args:
            views: Of the buffer.
            ends: Bytes of the buffer up to the end of each.
        """
        self._views = views
        self._ends = ends
        self._changed = threading.Condition()
        self._arrived_bytes = 0
        self._is_abandoned = False
        self.origin = object()
        """Stands for this content of the buffer; no other has it."""

    def advance(self, num_bytes: int) -> None:
        """So many bytes of the buffer, from its beginning, are there and proven."""
        with self._changed:
            self._arrived_bytes = num_bytes
            self._changed.notify_all()

    def abandon(self) -> None:
        """No more will come."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def __getitem__(self, name: str) -> Tensor:
        end = self._ends[name]
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or self._arrived_bytes >= end)
            if self._arrived_bytes < end:
                raise Abandoned(name)
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def origin_of(tensors: Mapping[str, Tensor]) -> object | None:
    """What stands for their content; None where nothing does, since it may change."""
    return tensors.origin if isinstance(tensors, ArrivingTensors) else None
