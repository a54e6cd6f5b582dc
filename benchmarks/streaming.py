"""How fast the streams of one RolloutActor reach one consumer, and what a paused replica costs.

    python -m benchmarks.streaming [--quick] [--json FILE]

One real replica with the demo's model and one consumer in this process, over Ray. Each round
samples the same turns without streams and with, either first every other time, so that the ratio
tells what streaming costs. A chunk is what one turn got in one message; while the consumer is at
work further steps join the next message. The second consumer of the last load takes nothing at all.
Processor time is that of the replica's process while it is paused with turns under way, Ray's own
threads included.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, SamplingConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.runtime.rollout_config import RolloutConfig
from benchmarks.common import finish, median, options, ray_session, spread, table
from benchmarks.sampling import without_stop_tokens
from tests.support.tiny_models import write_tiny_model

TURN_TOKENS = 256
STREAMS = (16, 64, 256)


@dataclass(frozen=True)
class Measured:
    """One load in one round."""

    streams: int
    second_consumer: bool
    seconds: float
    seconds_without_streams: float
    chunks: int
    tokens: int
    messages: int
    first_chunk_s: float


class Stage:
    """A replica and who asks it."""

    def __init__(self, model: Path) -> None:
        import ray

        from areal_ray.runtime.rollout_actor import RolloutActor

        config = RolloutConfig(engine=TorchGenerationConfig(max_slots=512))
        actor: Any = ray.remote(RolloutActor)
        self.replica = actor.options(num_cpus=0).remote("rollout-0", str(model), config, version=0)
        self._number = 0

    def client(self) -> Any:
        """A consumer of its own."""
        from areal_ray.runtime.rollout_client import RolloutClient

        self._number += 1
        return RolloutClient({"rollout-0": self.replica}, f"consumer-{self._number}")

    def turns(self, count: int) -> list[GenerationRequest]:
        """Turns under new names."""
        self._number += 1
        random = np.random.default_rng(0)
        return [
            GenerationRequest(
                f"{self._number}-{i}",
                random.integers(3, 400, 20).astype(np.int32),
                SamplingConfig(max_new_tokens=TURN_TOKENS),
                seed=i,
            )
            for i in range(count)
        ]

    async def measure(self, streams: int, number: int, *, second_consumer: bool) -> Measured:
        """The same turns without streams and with, in the order of an even or odd round."""
        client = self.client()
        without = await self._whole(client, streams) if number % 2 else 0.0
        idle = self.client()
        unread = [idle.stream(turn) for turn in self.turns(streams if second_consumer else 0)]
        for stream in unread:
            await anext(stream)
        counts: list[tuple[int, int, float]] = []
        messages, begin = client.num_collects, time.perf_counter()

        async def take(turn: GenerationRequest) -> None:
            chunks = tokens = 0
            first_s = 0.0
            async for part in client.stream(turn):
                if isinstance(part, GenerationChunk):
                    first_s = first_s or time.perf_counter() - begin
                    chunks += 1
                    tokens += len(part.token_ids)
            counts.append((chunks, tokens, first_s))

        await asyncio.gather(*(take(turn) for turn in self.turns(streams)))
        seconds = time.perf_counter() - begin
        messages = client.num_collects - messages
        for stream in unread:
            await stream.aclose()
        await idle.close()
        without = without or await self._whole(client, streams)
        await client.close()
        chunks, tokens = (sum(each[i] for each in counts) for i in (0, 1))
        first_s = median(first_s for _, _, first_s in counts)
        return Measured(
            streams, second_consumer, seconds, without, int(chunks), int(tokens), messages, first_s
        )

    async def _whole(self, client: Any, count: int) -> float:
        """Seconds for as many turns that come whole."""
        begin = time.perf_counter()
        await asyncio.gather(*(client.generate(turn) for turn in self.turns(count)))
        return time.perf_counter() - begin

    async def paused_share(self, seconds: float, *, asleep: bool) -> float:
        """Processor time over time while paused with turns under way."""
        client = self.client()
        turns = [asyncio.ensure_future(client.generate(turn)) for turn in self.turns(64)]
        await asyncio.sleep(0.1)
        await self.replica.pause.remote(asleep=asleep)
        pid = (await self.replica.health.remote()).pid
        await asyncio.sleep(0.5)
        begin, used = time.perf_counter(), _processor_s(pid)
        await asyncio.sleep(seconds)
        share = (_processor_s(pid) - used) / (time.perf_counter() - begin)
        await self.replica.resume.remote()
        await asyncio.gather(*turns)
        await client.close()
        return share


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


COLUMNS = (
    ("load", 40), ("chunks/s", 10), ("tokens/s", 10), ("without streams", 16), ("ratio", 7),
    ("streams a message", 18), ("first chunk, ms", 16),
)  # fmt: skip


def cells(measured: Sequence[Measured]) -> list[str]:
    """One line of the table."""
    name = f"{measured[0].streams} streams of {TURN_TOKENS}"
    if measured[0].second_consumer:
        name += ", as many unread"
    rate = median(m.tokens / m.seconds for m in measured)
    without = median(m.tokens / m.seconds_without_streams for m in measured)
    return [
        name,
        f"{median(m.chunks / m.seconds for m in measured):,.0f}",
        f"{rate:,.0f}",
        f"{without:,.0f}",
        f"{median(m.seconds_without_streams / m.seconds for m in measured):.2f}",
        f"{median(m.chunks / m.messages for m in measured):.1f}",
        f"{median(m.first_chunk_s * 1000 for m in measured):.1f}",
    ]


async def compare(stage: Stage, rounds: int, quick: bool) -> tuple[list[list[Measured]], Any]:
    """Every load, interleaved; the first round only warms up."""
    loads = [(count, False) for count in STREAMS[: 2 if quick else None]] + [(64, True)]
    found: list[list[Measured]] = [[] for _ in loads]
    for number in range(rounds + 1):
        for place, (streams, second) in enumerate(loads):
            measured = await stage.measure(streams, number, second_consumer=second)
            if number:
                found[place].append(measured)
    shares = {
        name: [await stage.paused_share(2.0 if quick else 5.0, asleep=asleep) for _ in range(3)]
        for name, asleep in (("paused", False), ("asleep", True))
    }
    return found, shares


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print the table, write JSON if asked."""
    asked = options(__doc__, arguments)
    rounds = asked.rounds or (3 if asked.quick else 7)
    with tempfile.TemporaryDirectory() as scratch, ray_session():
        model = without_stop_tokens(write_tiny_model(Path(scratch) / "model", vocab_size=407))
        found, shares = asyncio.run(compare(Stage(model), rounds, asked.quick))
    lines = [table(COLUMNS, map(cells, found))]
    lines += [
        f"processor time while {name}: {spread([100 * share for share in some])} % of a core"
        for name, some in shares.items()
    ]
    rows = [asdict(measured) for some in found for measured in some]
    finish("\n".join(lines), {"rounds": rows, "idle_share": shares}, asked.json)


if __name__ == "__main__":
    main()
