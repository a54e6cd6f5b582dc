"""What the gateway's edge costs: latency, requests and chunks a second, memory of idle sessions.

    python -m benchmarks.gateway [--quick] [--json FILE]

A real gateway (HTTP edge, chat dialect, reply parser, recorder) over loopback, with a scripted
sampler that costs next to nothing, and `areal-ray load` in a process of its own as the client: both
share the machine's cores, and the client costs as much as the server.

*Added*: a call by HTTP less the same turn awaited of the sampler directly, one at a time, in turns,
with a record that stays open; *first token* likewise. Processor time is that of the gateway's
process, over what it answered: it says what an idle machine would bear where this one is busy.
A thousand streams that begin at once are measured five times, the median round is told.
Sessions: resident memory of 2,000 records of two turns each, over their number.
"""

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop

from areal_ray.core.turn import TurnRequest
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.load import LoadPlan, LoadReport, measure_load
from benchmarks.common import finish, median, options, table
from tests.support.gateway import Gateway, serving
from tests.support.scripted_sampler import Said

TEXT = "The sum of twelve and thirty is forty two, and so on"
PROMPT = [{"role": "user", "content": "What is 12 plus 30?"}]
CHAT = "/v1/chat/completions"
STREAMS = 1000
NUM_SESSIONS = 2000


@dataclass(frozen=True)
class Loaded:
    """One load: what the client saw, and what the gateway's process spent."""

    name: str
    report: LoadReport
    server_cpu_s: float

    @property
    def cpu_ms(self) -> float:
        """Of the gateway's process, a request."""
        return 1000 * self.server_cpu_s / max(1, self.report.num_answered)


def chunks_per_s(load: Loaded) -> float:
    """Streamed pieces that reached the client, a second."""
    return load.report.num_pieces / load.report.seconds


def ask_from_outside(plan: LoadPlan) -> LoadReport:
    """The client's process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure_load(plan))


async def loaded(pool: ProcessPoolExecutor, name: str, said: Said, plan: dict[str, Any]) -> Loaded:
    """A fresh gateway under a load."""
    async with serving([said], limits=CallLimits(4096, 8192)) as gateway:
        began = time.process_time()
        asked = LoadPlan(url=gateway.url, **plan)
        loop = asyncio.get_running_loop()
        report = await loop.run_in_executor(pool, ask_from_outside, asked)
        return Loaded(name, report, time.process_time() - began)


async def alone(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of one call at a time: the sampler's own, whole and streamed over HTTP."""
    found: dict[str, list[float]] = {
        name: [] for name in ("engine", "whole", "engine_first", "stream_first")
    }
    async with (
        serving([Said(TEXT)]) as gateway,
        # As engines do, it lets the loop go before each chunk.
        serving([Said(TEXT, pause_s=0.002)]) as paced,
        aiohttp.ClientSession() as session,
    ):
        for number in range(rounds + 20):
            times = {
                "engine": await direct_ms(gateway, f"d{number}", is_first=False),
                "whole": await http_ms(session, gateway, number, is_stream=False),
                "engine_first": await direct_ms(paced, f"f{number}", is_first=True),
                "stream_first": await http_ms(session, paced, number, is_stream=True),
            }
            if number >= 20:
                for name, spent in times.items():
                    found[name].append(spent)
    return found


async def direct_ms(gateway: Gateway, name: str, *, is_first: bool) -> float:
    """Of a turn that is awaited of the sampler."""
    ids = np.arange(3, 30, dtype=np.int32)
    request = TurnRequest(
        request_id=name, prompt_ids=ids, max_new_tokens=64, stop=(), seed=0, prefix_key=""
    )
    began = time.perf_counter()
    if not is_first:
        await gateway.sampler.sample(request)
        return 1000 * (time.perf_counter() - began)
    stream = gateway.sampler.stream(request)
    await anext(stream)
    spent = 1000 * (time.perf_counter() - began)
    await stream.aclose()
    return spent


async def http_ms(
    session: aiohttp.ClientSession, gateway: Gateway, number: int, *, is_stream: bool
) -> float:
    """Of the same turn by HTTP, or of its first text, in one of fifty sessions."""
    url = f"{gateway.url}/s/{number % 50}{CHAT}"
    body = {"model": "m", "messages": PROMPT, "stream": is_stream}
    began = time.perf_counter()
    async with session.post(url, json=body) as response:
        if not is_stream:
            await response.read()
            return 1000 * (time.perf_counter() - began)
        spent = 0.0
        async for line in response.content:
            if not spent and b'"content":"' in line and b'"content":""' not in line:
                spent = 1000 * (time.perf_counter() - began)
        return spent


def session_bytes(count: int) -> float:
    """Resident memory of a session that has made two calls and waits; in a process of its own."""
    return asyncio.run(_session_bytes(count))


async def _session_bytes(count: int) -> float:
    async with serving([Said(TEXT)]) as gateway, aiohttp.ClientSession() as session:
        told: dict[int, str] = {}

        async def call(number: int) -> None:
            turns = [*PROMPT]
            if number in told:
                said = {"role": "assistant", "content": told[number]}
                turns += [said, {"role": "user", "content": f"And {number}?"}]
            url = f"{gateway.url}/s/{number}{CHAT}"
            async with session.post(url, json={"model": "m", "messages": turns}) as response:
                content = json.loads(await response.read())
                told[number] = content["choices"][0]["message"]["content"]

        for number in range(200):  # what every process has once
            await call(-1 - number)
        gateway.sampler.requests.clear()
        gateway.sampler.sampled.clear()
        gc.collect()
        before = _resident_bytes()
        for _ in range(2):
            for number in range(count):
                await call(number)
        told.clear()
        gateway.sampler.requests.clear()
        gateway.sampler.sampled.clear()
        gc.collect()
        return (_resident_bytes() - before) / count


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


COLUMNS = (
    ("load", 30), ("answered", 9), ("errors", 7), ("requests/s", 11), ("chunks/s", 9),
    ("first p50, ms", 14), ("p50, ms", 9), ("p99, ms", 9), ("server CPU, ms", 15),
)  # fmt: skip


def cells(load: Loaded) -> list[str]:
    """One line of the table."""
    report = load.report
    first, whole = report.first_token_ms, report.request_ms
    return [
        load.name,
        f"{report.num_answered:,}",
        f"{sum(report.errors.values()):,}",
        f"{report.requests_per_s:,.0f}",
        f"{chunks_per_s(load):,.0f}",
        f"{first.p50:,.1f}" if first else "-",
        f"{whole.p50:,.1f}" if whole else "-",
        f"{whole.p99:,.1f}" if whole else "-",
        f"{load.cpu_ms:.2f}",
    ]


async def measure(quick: bool, rounds: int) -> tuple[str, dict[str, Any]]:
    """Everything, and the figures behind it."""
    spawned = multiprocessing.get_context("spawn")
    loads = []
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        count = 300 if quick else 3000
        plain = {"num_requests": count, "concurrency": 32, "is_streamed": False}
        loads.append(await loaded(pool, "whole, 32 at a time", Said(TEXT), plain))
        plain = {"num_requests": count, "concurrency": 32}
        loads.append(await loaded(pool, "streams, 32 at a time", Said(TEXT), plain))
        many = {"num_requests": STREAMS, "concurrency": STREAMS}
        paced = Said(TEXT, pause_s=0.05)
        repeated = 1 if quick else 5  # each takes seconds, and what begins at once varies most
        all_at_once = [
            await loaded(pool, "1,000 streams at once", paced, many) for _ in range(repeated)
        ]
        loads.append(sorted(all_at_once, key=chunks_per_s)[repeated // 2])
    found = await alone(rounds)
    middle = {name: median(times) for name, times in found.items()}
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        each = pool.submit(session_bytes, 500 if quick else NUM_SESSIONS).result()
    added, first = middle["whole"] - middle["engine"], middle["stream_first"]
    lines = [
        table(COLUMNS, map(cells, loads)),
        f"one at a time: added {added:.2f} ms (p50), client included; first token "
        f"{first - middle['engine_first']:.2f} ms after the engine's (p50)",
        f"an idle session of two turns: {each / 1000:.1f} KB",
    ]
    rows = [{**asdict(load), "cpu_ms": load.cpu_ms} for load in loads]
    return "\n".join(lines), {"loads": rows, "alone_ms": middle, "session_bytes": each}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print the table, write JSON if asked."""
    asked = options(__doc__, arguments)
    rounds = asked.rounds or (100 if asked.quick else 500)
    # As in an actor: Ray takes uvloop where it is there.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        text, figures = runner.run(measure(asked.quick, rounds))
    finish(text, figures, asked.json)


if __name__ == "__main__":
    main()
