"""Streams of a real rollout actor: many in a message, whatever becomes of their consumers."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.runtime.rollout_config import RolloutConfig
from tests.support.conformance import processor_seconds
from tests.support.tiny_models import write_tiny_model

ENDLESS = {"2": -100.0}
"""Bias under which no turn ends by itself."""


class Stage:
    """Rollout replicas, and clients of theirs."""

    def __init__(self, folder: Path) -> None:
        import ray

        self.ray = ray
        self.model = str(write_tiny_model(folder))
        self.actors: list[Any] = []

    def replica(self, **engine: Any) -> Any:
        from areal_ray.runtime.rollout_actor import RolloutActor

        config = RolloutConfig(engine=TorchGenerationConfig(max_context_tokens=1024, **engine))
        actor = (
            self.ray.remote(RolloutActor)
            .options(num_cpus=0, max_restarts=0)
            .remote(f"rollout-{len(self.actors)}", self.model, config, version=3)
        )
        self.actors.append(actor)
        return actor

    @staticmethod
    def client(*replicas: Any) -> Any:
        from areal_ray.runtime.rollout_client import RolloutClient

        named = {f"rollout-{i}": replica for i, replica in enumerate(replicas)}
        return RolloutClient(named, f"client-{uuid.uuid4().hex[:6]}")


@pytest.fixture(scope="module")
def stage(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("model"))
    yield made
    for actor in made.actors:
        made.ray.kill(actor)


def turn(number: int, max_new_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        f"{uuid.uuid4().hex[:8]}-{number}",
        np.arange(5, 15, dtype=np.int32) + number,
        SamplingConfig(max_new_tokens=max_new_tokens, logit_bias=ENDLESS),
        seed=number,
    )


async def taken(client: Any, sent: GenerationRequest) -> tuple[list[GenerationChunk], Any]:
    parts = [part async for part in client.stream(sent)]
    assert isinstance(parts[-1], GenerationResult)
    return parts[:-1], parts[-1]


def within(seconds: float, coroutine: Any) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(run())


def test_many_streams_come_whole_and_share_their_messages(stage: Stage) -> None:
    replica = stage.replica()

    async def run() -> None:
        client = stage.client(replica)
        sent = [turn(i, 40 + i) for i in range(48)]
        streams = await asyncio.gather(*(taken(client, one) for one in sent))
        whole = await asyncio.gather(*(client.generate(turn(i, 40 + i)) for i in range(48)))
        for (chunks, result), alone in zip(streams, whole, strict=True):
            np.testing.assert_array_equal(result.token_ids, alone.token_ids)
            for name in ("token_ids", "logprobs", "versions"):
                joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
                np.testing.assert_array_equal(joined, getattr(result, name))
            assert len(chunks) > 3
        assert sum(len(chunks) for chunks, _ in streams) > 5 * client.num_collects
        await client.close()

    within(120, run())


def test_a_consumer_that_breaks_off_ends_its_turn_on_the_replica(stage: Stage) -> None:
    replica = stage.replica()

    async def run() -> None:
        client = stage.client(replica)
        async for chunk in client.stream(turn(0, 1000)):
            if isinstance(chunk, GenerationChunk):
                break
        consumer = asyncio.ensure_future(taken(client, turn(1, 1000)))
        await asyncio.sleep(0.2)
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        while (health := await replica.health.remote()).engine.num_running:
            await asyncio.sleep(0.02)
        assert health.engine.sampled_tokens < 2000
        assert client.num_pending == 0
        await client.close()

    within(60, run())


def test_a_client_that_never_fetches_holds_nobody_up(stage: Stage) -> None:
    replica = stage.replica()

    async def run() -> None:
        from areal_ray.runtime.turn_wire import RequestBatch

        streamed = [
            GenerationRequest(one.request_id, one.prompt_ids, one.sampling, one.seed, "", True)
            for one in (turn(i, 900) for i in range(8))
        ]
        await replica.submit.remote("vanished", RequestBatch(streamed))
        client = stage.client(replica)
        chunks, result = await taken(client, turn(9, 300))
        assert len(result.token_ids) == 300
        assert len(chunks) > 5
        await client.close()
        late = await replica.collect.remote("vanished")
        had = {one.request_id: len(one.token_ids) for one in (*late.chunks, *late.results)}
        assert len(had) == 8
        assert all(count >= 250 for count in had.values())

    within(60, run())


def test_a_stream_outlives_its_replica_and_samples_what_it_would_have(stage: Stage) -> None:
    first, second = stage.replica(), stage.replica()

    async def run() -> None:
        alone = stage.client(second)
        expected = await asyncio.gather(*(alone.generate(turn(i, 900)) for i in range(4)))
        client = stage.client(first, second)
        begun = asyncio.Event()

        async def follow(number: int) -> tuple[list[int], Any]:
            ids: list[int] = []
            async for part in client.stream(turn(number, 900)):
                if isinstance(part, GenerationResult):
                    return ids, part
                ids += part.token_ids.tolist()
                begun.set()
            raise AssertionError("a stream without an end")

        followed = [asyncio.ensure_future(follow(i)) for i in range(4)]
        await begun.wait()
        stage.ray.kill(first)
        for (ids, result), whole in zip(await asyncio.gather(*followed), expected, strict=True):
            assert ids == result.token_ids.tolist() == whole.token_ids.tolist()
            np.testing.assert_allclose(result.logprobs, whole.logprobs, atol=1e-4)
        await client.close()
        await alone.close()

    within(120, run())


@pytest.mark.parametrize("asleep", [False, True], ids=["paused", "asleep"])
def test_a_paused_replica_with_streams_under_way_uses_no_processor_time(
    stage: Stage, asleep: bool
) -> None:
    replica = stage.replica()

    async def run() -> None:
        client = stage.client(replica)
        consumers = [asyncio.ensure_future(taken(client, turn(i, 700))) for i in range(4)]
        await asyncio.sleep(0.1)
        await replica.pause.remote(asleep=asleep)
        pid = (await replica.health.remote()).pid
        await asyncio.sleep(0.5)
        begin, used = time.monotonic(), sum(processor_seconds(pid).values())
        before = (await replica.health.remote()).engine.sampled_tokens
        await asyncio.sleep(3.0)
        used, elapsed = sum(processor_seconds(pid).values()) - used, time.monotonic() - begin
        assert used < 0.02 * elapsed, f"{used:.2f} s of processor time in {elapsed:.1f} s"
        assert (await replica.health.remote()).engine.sampled_tokens == before
        await replica.resume.remote()
        for chunks, result in await asyncio.gather(*consumers):
            assert len(result.token_ids) == 700
            assert chunks
        await client.close()

    within(120, run())
