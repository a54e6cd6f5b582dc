"""Calls to actors whose answer nobody is left to hear."""

import asyncio
import gc
from typing import Any

from areal_ray.errors import ActorLost
from areal_ray.runtime.fleet import unheard


def complaints_of(start: Any) -> list[str]:
    """What asyncio complains of when work fails after its only waiter has gone."""
    heard: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ActorLost("reward-0 died")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: heard.append(context["message"])
        )
        work = start(fail())
        waiter = asyncio.ensure_future(asyncio.shield(work))
        waiter.cancel()
        await asyncio.wait([work])
        del work
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    return heard


def test_an_actor_lost_after_the_run_stopped_waiting_for_it_prints_no_traceback():
    assert any("never retrieved" in text for text in complaints_of(asyncio.ensure_future))
    assert complaints_of(unheard) == []
