"""Bringing the committed weights whole to a replica that has none of them, or others.

Waits: for each answer of the replica up to `limit_s`.
"""

from typing import Any

from areal_ray.core.canary import Swapped
from areal_ray.errors import PublishError
from areal_ray.runtime.answers import ask
from areal_ray.runtime.publish_report import Committed


async def bring_committed(name: str, replica: Any, committed: Committed, limit_s: float) -> None:
    """Have a replica load the committed version and prove it; something has been published.

    Raises:
        ArealRayError: It did not take it, or does not sample from it.
    """
    version = committed.version
    loading = replica.weights_load.remote(committed.plan, version, committed.snapshot)
    await ask(name, loading, "weights_load", limit_s)
    swapping = replica.weights_swap.remote(version, committed.check)
    swapped: Swapped = await ask(name, swapping, "weights_swap", limit_s)
    if swapped.proof.difference:
        raise PublishError(f"{name}, brought to {version}: {swapped.proof.difference}")


async def catch_up(name: str, replica: Any, committed: Committed, limit_s: float) -> None:
    """The same for one that has just loaded: a version may have been committed meanwhile.

    Raises:
        ArealRayError: As `bring_committed`.
    """
    held = await ask(name, replica.version.remote(), "version", limit_s)
    if committed.plan is not None and held != committed.version:
        await bring_committed(name, replica, committed, limit_s)
