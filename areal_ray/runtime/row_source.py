"""RowSource: rows of a user's function, tokenized once, and which of them a rank takes.

Lives in the learner actors, so that no row passes through the driver. Each rank draws the same
order from the same seed and keeps its own slice.
"""

import functools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from areal_ray.core.imports import resolve
from areal_ray.errors import DataError

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How long a row may be."""

    key: str
    """Of the recipe, that says so."""
    most: int | None
    """Longer ones are left out; None = none."""
    positions: int
    """That the model was trained on; 0 = its config does not say."""

    @classmethod
    def of(cls, key: str, most: int | None, model_path: str) -> Self:
        """That of a section."""
        try:
            said = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
            return cls(key, most, int(said["max_position_embeddings"]))
        except (OSError, ValueError, TypeError, LookupError):
            return cls(key, most, 0)

    def keeps(self, num_tokens: int, where: str) -> bool:
        """Whether a row of this length is trained on.

        Raises:
            DataError: It is longer than the model allows; `where` names it.
        """
        if self.most is not None and num_tokens > self.most:
            return False
        if 0 < self.positions < num_tokens:
            raise DataError(
                f"{where}: has {num_tokens} tokens; must have at most {self.positions}, as "
                f"model.path allows. Set {self.key} to leave longer ones out"
            )
        return True


class RowSource(Generic[RowT]):
    """The same rows whenever they are asked for."""

    def __init__(
        self,
        read: Callable[[Iterable[Any], str], list[RowT]],
        *,
        roots: Sequence[str] = (),
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Load nothing yet.

        Args:
            read: Rows as they will be trained on, from what the function gave and where it stands.
            roots: Import roots for the function.
            seed: Of the order.
            rank: This one's number.
            num_ranks: All of them.
        """
        self._read = read
        self._roots = roots
        self._seed = seed
        self._rank = rank
        self._num_ranks = num_ranks
        self._loaded: dict[str, list[RowT]] = {}

    def batch(
        self, where: str, source: str, args: Mapping[str, Any], *, first: int, size: int, order: str
    ) -> list[RowT]:
        """This rank's slice of the `size` rows from `first` on, of shuffled epochs."""
        rows = self._rows(where, source, args)
        picked = _picked(len(rows), first, size, f"{self._seed}/{order}")
        return [rows[i] for i in picked[self._rank :: self._num_ranks]]

    def first(self, where: str, source: str, args: Mapping[str, Any], count: int) -> list[RowT]:
        """This rank's slice of the first `count` rows."""
        return self._rows(where, source, args)[:count][self._rank :: self._num_ranks]

    def _rows(self, where: str, source: str, args: Mapping[str, Any]) -> list[RowT]:
        if where not in self._loaded:
            rows = resolve(source, self._roots, where=f"{where}.source")(**args)
            self._loaded[where] = self._read(rows, f"{where}: {source}")
        return self._loaded[where]


def _picked(count: int, first: int, size: int, seed: str) -> list[int]:
    """Indices of `size` rows from `first` on, out of an endless sequence of shuffled epochs."""
    picked: list[int] = []
    while len(picked) < size:
        epoch, start = divmod(first + len(picked), count)
        order = _order(count, f"{seed}/{epoch}")
        picked += order[start : start + size - len(picked)]
    return picked


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
