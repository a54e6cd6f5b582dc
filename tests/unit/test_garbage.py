"""Promises about how actors look for garbage."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from areal_ray.runtime.garbage import collect_rarely


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    """Something that can be part of a cycle."""


def test_what_was_loaded_before_is_not_looked_at_again() -> None:
    collect_rarely()
    assert gc.get_freeze_count() > 1000
    assert len(gc.get_objects()) < gc.get_freeze_count()


def test_cycles_made_later_are_still_freed_by_themselves() -> None:
    collect_rarely()
    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    alive = weakref.ref(node)
    del node
    kept = [[] for _ in range(gc.get_threshold()[0] + 10)]
    assert alive() is None
    assert kept
