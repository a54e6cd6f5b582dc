"""Parts of tensors over real ranks: any slice is read whole, and a death ends every wait."""

import os
import time

import pytest
import torch

from areal_ray.engines.process_group import RankGroup, Rendezvous
from areal_ray.engines.tensor_parts import Extent, PartGroup
from areal_ray.errors import EngineError
from tests.support.processes import spawn as spawn

WHOLE = {"a": torch.arange(10.0), "b": torch.arange(4.0), "empty there": torch.arange(1.0)}
CUTS = {"a": 6, "b": 2, "empty there": 1}
TIMEOUT_S = 120.0


def _own(rank):
    """This rank's part of each tensor: up to the cut, or from it on."""
    found = {}
    for name, tensor in WHOLE.items():
        start, stop = (0, CUTS[name]) if rank == 0 else (CUTS[name], len(tensor))
        found[name] = (Extent(start, stop - start), tensor[start:stop].clone())
    return found


def _joined(place, rank):
    parts = PartGroup(RankGroup.join(place, rank, 2, timeout_s=TIMEOUT_S), TIMEOUT_S)
    return parts, parts.extents({name: extent for name, (extent, _) in _own(rank).items()})


def _other_rank(address, dies_after):
    """Serves reads; dies in the middle of the next one."""
    parts, extents = _joined(address, 1)
    own, names, served = _own(1), list(WHOLE), 0

    def part_of(index):
        nonlocal served
        if served == dies_after:
            os._exit(9)
        served += 1
        return own[names[index]]

    parts.answer(part_of)
    for name in names:
        parts.collect(extents[name], own[name][1])
        parts.deal(extents[name], torch.empty(0), own[name][1].zero_())
    assert own["a"][1].tolist() == [12, 14, 16, 18]
    parts.answer(part_of)


def _first_rank(address):
    _joined(address, 0)
    os._exit(9)


def _reading_rank(address):
    """Reads any slice, then what the other rank does not live to send."""
    parts, extents = _joined(address, 0)
    own, names = _own(0), list(WHOLE)

    def read(name, start, stop):
        bounds = Extent(start, stop - start)
        return parts.read(names.index(name), bounds, extents[name], own[name][1]).tolist()

    assert read("a", 0, 10) == WHOLE["a"].tolist()
    assert read("a", 4, 9) == [4, 5, 6, 7, 8]
    assert read("b", 3, 4) == [3]
    assert read("a", 0, 3) == [0, 1, 2]
    assert read("empty there", 0, 1) == [0]
    parts.release()
    for name, tensor in WHOLE.items():
        assert parts.collect(extents[name], own[name][1]).equal(tensor)
        parts.deal(extents[name], 2 * tensor, own[name][1])
    assert own["a"][1].tolist() == [0, 2, 4, 6, 8, 10]
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="exchange of weights over ranks failed"):
        read("a", 0, 10)
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    parts.ranks.close()


def _serving_rank(address):
    parts, _ = _joined(address, 1)
    with pytest.raises(EngineError, match="Another rank has died or is stuck"):
        parts.answer(lambda index: _own(1)["a"])
    parts.ranks.close()


@pytest.mark.parametrize(
    ("dies", "lives"),
    [((_other_rank, 5), (_reading_rank,)), ((_first_rank,), (_serving_rank,))],
    ids=["any slice is read until the server dies", "the server learns that the reader died"],
)
def test_a_death_ends_what_the_other_rank_waits_for(spawn, dies, lives):
    meeting = Rendezvous.open("127.0.0.1", 2, TIMEOUT_S)
    dying, living = (spawn(rank, meeting.address, *more) for rank, *more in (dies, lives))
    living.join(TIMEOUT_S + 60)  # what it says stands on standard error
    dying.join(TIMEOUT_S)
    assert (dying.exitcode, living.exitcode) == (9, 0)
