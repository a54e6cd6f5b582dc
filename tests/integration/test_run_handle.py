"""launch() as a notebook uses it: within a running event loop, more than once."""

import asyncio

from tests.support.whole_runs import PATIENCE_S, Runs, steps_of, until


def test_a_notebook_can_start_watch_and_stop_a_run_and_then_run_two_at_once(runs: Runs) -> None:
    async def cells() -> None:
        handle = runs.start("notebook", "steps=500")
        assert not steps_of(handle.folder)  # the cell ends before the run has begun
        await asyncio.to_thread(until, lambda: len(steps_of(handle.folder)) >= 2, "two steps")
        status = await asyncio.to_thread(
            until, lambda: handle.status() if handle.status().status.get("step") else None, "status"
        )
        assert status.is_running
        assert status.status["waits"]
        rows = handle.metrics()
        assert [row["step"] for row in rows[:2]] == [1, 2]
        assert "reward/mean" in handle.plot()
        handle.stop()
        summary = await asyncio.to_thread(handle.wait, 60)
        assert summary.outcome == "stopped"
        assert summary.steps < 500
        assert not handle.status().is_running
        # In one process and on one cluster: neither gets into the other's way.
        pair = [runs.start(name, "steps=3") for name in ("beside-0", "beside-1")]
        for run in pair:
            assert (await asyncio.to_thread(run.wait, PATIENCE_S)).outcome == "finished"
            assert steps_of(run.folder) == [1, 2, 3]

    asyncio.run(cells())
