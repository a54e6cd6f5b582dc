"""AdmissionGate: the one back-pressure of the system.

admit:  waits for headroom; unblocked by finish(), release(), open_to() and close().
"""

import asyncio

from areal_ray.core.versions import AdmissionConfig, admissible_groups


class AdmissionGate:
    """Counts groups in flight and lets one start whenever the staleness bound allows it."""

    def __init__(self, config: AdmissionConfig, *, version: int = 0) -> None:
        self._config = config
        self._version = version
        # After a resume, what was trained so far is version * groups_per_step groups: without it
        # the headroom of a late version would admit that many stale groups at once.
        self._admitted = version * config.groups_per_step
        self._running = 0
        self._closed = False
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        """Version that admitted groups start from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Groups admitted and neither in the queue nor ended."""
        return self._running

    @property
    def headroom(self) -> int:
        """Groups that may start now."""
        return admissible_groups(self._version, self._admitted, self._running, self._config)

    async def admit(self) -> bool:
        """Wait until a group may start and count it; False once the gate is closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self.headroom > 0)
            if self._closed:
                return False
            self._admitted += 1
            self._running += 1
            return True

    async def finish(self) -> None:
        """A running group reached the queue: it no longer runs but still counts as admitted."""
        await self._change(running=-1)

    async def fail(self) -> None:
        """A running group ended without a usable result: hand back its admission."""
        await self._change(running=-1, admitted=-1)

    async def release(self, groups: int) -> None:
        """Queued groups were dropped: hand back their admissions."""
        await self._change(admitted=-groups)

    async def open_to(self, version: int) -> None:
        """A version was committed: groups may run ahead of it."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def close(self) -> None:
        """Admit nothing more; whoever waits in admit() gets False."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def _change(self, *, running: int = 0, admitted: int = 0) -> None:
        async with self._changed:
            self._running += running
            self._admitted += admitted
            assert min(self._running, self._admitted) >= 0, "a group was handed back twice"
            self._changed.notify_all()
