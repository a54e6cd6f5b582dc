"""All replicas of a gateway, as one of them knows them, and where calls of fixed keys belong."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_ray.gateway.keys import home_of


@dataclass(frozen=True, slots=True)
class Peers:
    """The replicas at one moment."""

    urls: Mapping[str, str] = field(default_factory=dict)
    """Base URL by name, of those that listen; empty where there is one alone."""
    founders: frozenset[str] = frozenset()
    """Those that the run began with; empty = all. Fixed keys are spread over them, so that a
    replica that is added takes no key from the one where its session is."""
    leaving: frozenset[str] = frozenset()
    """Those that start nothing more, and go once they hold nothing."""

    def others(self, name: str) -> list[str]:
        """All but one, in order."""
        return [other for other in sorted(self.urls) if other != name]

    def home(self, key: str) -> str:
        """The replica that a fixed key belongs to."""
        return home_of(key, self._homes() or self.urls)

    def other_home(self, key: str, name: str) -> str:
        """The same as one of the replicas sees it: empty if it is itself, or alone."""
        home = self.home(key) if self.urls else ""
        return "" if home == name else home

    def successor(self, key: str) -> str:
        """The one that a fixed key belongs to as soon as its home starts nothing more."""
        staying = self._homes() - self.leaving or set(self.urls) - self.leaving
        return home_of(key, staying)

    def _homes(self) -> frozenset[str]:
        return self.founders & self.urls.keys()
