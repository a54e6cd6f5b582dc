"""How a gateway does, as the driver and `areal-ray status` see it."""

from dataclasses import dataclass

from areal_ray.gateway.sessions import SessionCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHealth:
    """One gateway's account of itself."""

    name: str
    incarnation: str
    """Differs after every restart."""
    url: str
    """Base of its routes: `http://HOST:PORT`."""
    num_calls: int
    """Model calls since start."""
    num_open: int
    """Being answered."""
    num_failed: int
    num_defects: int
    num_turns_pending: int
    """Waiting for a rollout replica."""
    sessions: SessionCounts | None = None
    """None where it serves without."""

    @property
    def told(self) -> str:
        """On one line, for `areal-ray status`."""
        calls = f"{self.url}, {self.num_calls:,} calls, {self.num_open} under way"
        if self.num_failed:
            calls += f", {self.num_failed} failed"
        if self.sessions is None:
            return calls
        held = self.sessions
        rejected = sum(held.rejected.values())
        return (
            f"{calls}; sessions: {held.num_open} open, {held.num_waiting} waiting, "
            f"{held.num_admitted} admitted, {held.num_trained} trained, {rejected} rejected; "
            f"groups: {held.num_ready + held.num_held} sealed, room for {held.num_slots}"
        )
