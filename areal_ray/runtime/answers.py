"""One question to several actors at once: every answer has a deadline, every failure a name."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_ray.errors import ArealRayError, DeadlineExceeded
from areal_ray.runtime.fleet import call
from areal_ray.runtime.membership import GroupBroken


@dataclass(slots=True)
class Answers:
    """What each member answered to one verb."""

    good: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, ArealRayError] = field(default_factory=dict)

    def culprits(self) -> dict[str, ArealRayError]:
        """Members that failed by themselves."""
        return {
            name: error for name, error in self.failed.items() if not isinstance(error, GroupBroken)
        }

    def has_victims(self) -> bool:
        """Whether a member failed because another did."""
        return any(isinstance(error, GroupBroken) for error in self.failed.values())

    def listed(self) -> str:
        """All failures in one line."""
        return "; ".join(str(error) for error in self.failed.values())

    def compare(self, reference: str) -> None:
        """File as failed whose answer is not the reference member's, if that one answered."""
        if reference not in self.good:
            return
        expected = self.good[reference]
        for name in [name for name, answer in self.good.items() if answer != expected]:
            del self.good[name]
            self.failed[name] = ArealRayError(
                f"{name}: its digests differ from those of the {reference}; it staged other bytes"
            )


async def ask(name: str, answer: Awaitable[Any], verb: str, limit_s: float) -> Any:
    """Await one actor's answer.

    Raises:
        DeadlineExceeded: There was none in time; names the actor and the verb.
        ArealRayError: See `fleet.call`.
    """
    try:
        return await asyncio.wait_for(call(name, answer), limit_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} did not answer {verb} in {limit_s:g} s") from error


async def ask_all(calls: Mapping[str, Awaitable[Any]], verb: str, limit_s: float) -> Answers:
    """Await all answers; one failure cuts no other member short."""
    answers = Answers()

    async def file(name: str, answer: Awaitable[Any]) -> None:
        try:
            answers.good[name] = await ask(name, answer, verb, limit_s)
        except ArealRayError as error:
            answers.failed[name] = error

    await asyncio.gather(*(file(name, answer) for name, answer in calls.items()))
    return answers
