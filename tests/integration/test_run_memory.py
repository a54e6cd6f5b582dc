"""A run's driver keeps nothing of the steps that are over."""

import os
from pathlib import Path

import pytest

from tests.support.whole_runs import Runs, until_step

FROM, TO = 15, 60
GROWTH_BYTES = 16 * 2**20
"""3,000 episodes; a record of each of a few KB would not fit."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.extended
def test_the_driver_does_not_grow_with_the_steps(runs: Runs) -> None:
    handle = runs.start(
        "memory",
        "agent.run=tests.support.digits:scripted",
        f"steps={TO}",
        "admission.n_samples=16",
        "checkpoint.every_steps=null",
        "telemetry.dump_every_steps=0",
    )
    until_step(handle, FROM)
    before = resident_bytes()
    until_step(handle, TO)
    assert resident_bytes() - before < GROWTH_BYTES
    assert handle.wait(60).outcome == "finished"
