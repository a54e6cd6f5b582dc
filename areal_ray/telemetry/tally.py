"""RunTally: what a whole run adds up to, resumptions included; for its summary."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from areal_ray.core.ledger import Ledger
from areal_ray.telemetry.summary import LedgerSummary

_REASONS_TOLD = 20


class RunTally:
    """Counts over a whole run, the part before a resumption included."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger
        self.staleness: Counter[int] = Counter()
        """Trained groups by learner version - oldest behaviour version trained on."""
        self.replaced: list[str] = []
        """Actors that died, a line each; not those before a resumption."""
        self.publishes: list[str] = []
        """Replicas that a publish set aside or took back, a line each; likewise."""
        self.scaled: list[str] = []
        """Numbers of actors that were changed, a line each; likewise."""

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "RunTally":
        """That of a run as its checkpoint left it, before the run goes on."""
        tally = cls(Ledger() if "ledger" in state else None)
        tally.load_state_dict(state)
        return tally

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON values."""
        state: dict[str, Any] = {
            "records": {"staleness": {str(k): n for k, n in self.staleness.items()}}
        }
        if self.ledger is not None:
            state["ledger"] = self.ledger.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; a state without counts leaves none."""
        if self.ledger is not None and "ledger" in state:
            self.ledger.load_state_dict(state["ledger"])
        known = state.get("records", {}).get("staleness", {})
        self.staleness = Counter({int(k): n for k, n in known.items()})

    def end_facts(self) -> dict[str, Any]:
        """What the run's summary needs beside its rows."""
        return {
            "staleness_histogram": dict(self.staleness),
            "ledger": self._ledger_summary(),
            "replaced": tuple(self.replaced),
            "publish_events": tuple(self.publishes),
            "scaled": tuple(self.scaled),
        }

    def _ledger_summary(self) -> LedgerSummary:
        if self.ledger is None:
            return LedgerSummary()
        reasons = self.ledger.dropped + self.ledger.failed
        return LedgerSummary(
            **self.ledger.counts(), reasons=dict(reasons.most_common(_REASONS_TOLD))
        )
