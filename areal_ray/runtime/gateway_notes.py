"""What the driver tells a gateway of its sessions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that became of the sessions of a group."""

    verb: str
    """admitted, trained, rejected or hand_back."""
    session_group: str
    sessions: tuple[str, ...]
    fact: str = ""
    """The ledger's name of the group, the step, or the reason."""
