"""Task: one problem statement with what its reward needs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One problem an agent attempts, the same for all episodes of a group."""

    id: str
    """Unique in its task source and stable between runs: the ledger is keyed by it."""
    messages: tuple[dict[str, Any], ...]
    """The opening conversation, in OpenAI chat form."""
    answer: Any = None
    """What the reward compares with; never shown to the model."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Anything else the agent or the reward wants."""
