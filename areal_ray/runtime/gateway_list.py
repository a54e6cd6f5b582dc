"""Which gateways a run has, in its journal: read by each of them about once a second.

The driver writes the list before it tells anybody; each gateway writes its own address, and removes
it when it leaves. An address that is there without its gateway is one that may hold sessions yet.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from areal_ray.core.storage import replace_text, writing
from areal_ray.gateway.peers import Peers

_FILE = "gateways.json"


@dataclass(frozen=True, slots=True)
class GatewayList:
    """Names as sessions know them: the number of each gateway, as text."""

    founders: tuple[str, ...]
    """Those that the run began with."""
    added: tuple[str, ...] = ()
    """Those that came since and are there."""
    leaving: tuple[str, ...] = ()
    """Those of both that are to go."""
    gone: tuple[str, ...] = ()
    """Founders that went."""

    @classmethod
    def of(cls, count: int) -> "GatewayList":
        """At a run's beginning."""
        return cls(tuple(map(str, range(count))))

    @classmethod
    def anew(cls, folder: Path, count: int) -> "GatewayList":
        """Of a run that begins or goes on with so many. Those that an earlier part of it left
        behind are named, so that their sessions' calls are told to come again until they listen."""
        left = tuple(left_behind(folder, count))
        return replace(cls.of(count), added=left, leaving=left)

    @classmethod
    def read(cls, folder: Path, count: int) -> "GatewayList":
        """What was written last, else as at the beginning."""
        path = folder / _FILE
        if not path.is_file():
            return cls.of(count)
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: tuple(names) for name, names in found.items()})

    def write(self, folder: Path) -> None:
        """This is so from now on.

        Raises:
            StorageError: The disk does not take it.
        """
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / _FILE, json.dumps(asdict(self)))

    def peers(self, folder: Path) -> Peers:
        """Those that listen, as the sessions of one of them need it."""
        names = [name for name in (*self.founders, *self.added) if name not in self.gone]
        if len(names) < 2:
            return Peers()
        files = {name: address_file(folder, name) for name in names}
        urls = {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}
        return Peers(urls, frozenset(self.founders), frozenset(self.leaving))


def address_file(folder: Path, name: str) -> Path:
    """Where a gateway writes its URL."""
    return folder / f"gateway-{name}.url"


def left_behind(folder: Path, count: int) -> list[str]:
    """Gateways of an earlier part of the run that had not left, beside the first `count`."""
    found = [path.stem.rpartition("-")[2] for path in folder.glob("gateway-*.url")]
    return sorted((name for name in found if int(name) >= count), key=int)
