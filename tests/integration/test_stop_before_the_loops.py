"""A run that is stopped while it still waits for the cluster ends at once, as stopped."""

from ray.util.placement_group import placement_group, remove_placement_group

from areal_ray.telemetry.progress import Progress
from tests.support.whole_runs import PATIENCE_S, Runs, until


class Told(Progress):
    """What a run says, kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, text: str) -> None:
        self.lines.append(text)


def test_it_does_not_wait_for_cpus_that_others_hold(runs: Runs) -> None:
    held = placement_group([{"CPU": 8}])
    assert held.wait(60)
    try:
        told = Told()
        handle = runs.start("unplaced", "deadlines.placement_s=3600", progress=told)
        until(lambda: "starting actors ..." in told.lines, "the wait for a placement")
        handle.stop()
        summary = handle.wait(PATIENCE_S)
    finally:
        remove_placement_group(held)
    assert (summary.outcome, summary.steps) == ("stopped", 0)


def test_nor_for_nodes_that_do_not_come(runs: Runs) -> None:
    handle = runs.start("no-nodes", "cluster.n_nodes=2", "deadlines.nodes_s=3600")
    handle.stop()
    assert handle.wait(PATIENCE_S).outcome == "stopped"
