"""SlotStream: what stands for tasks where the episodes come from outside.

Each slot is room for one group. The interface is that of `TaskStream`.
"""

from collections.abc import Mapping
from typing import Any

from areal_ray.agents.task_stream import Draw
from areal_ray.core.task import Task


class SlotStream:
    """Slots without end, each handed out once."""

    def __init__(self) -> None:
        self._next = 0

    def next(self) -> Draw:
        """A slot that was never handed out."""
        slot = Draw(Task(f"slot-{self._next}", ()), epoch=0, attempt=0)
        self._next += 1
        return slot

    def retry(self, task_id: str, epoch: int, attempt: int) -> None:
        """Nothing: what came in by a slot is offered again by whoever holds it, into another."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values."""
        return {"next_slot": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken."""
        self._next = int(state["next_slot"])
