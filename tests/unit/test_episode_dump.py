"""Episodes written down beside the event loop of an actor that serves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from areal_ray.core.trajectory import Group, Trajectory, encode_group
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.episode_dump import write_episodes
from areal_ray.telemetry.episodes import EPISODES_FILE
from tests.support.templates import TPL_A, letter_tokenizer


def group(name: str, num_tokens: int) -> bytes:
    ids = np.arange(num_tokens, dtype=np.int32) % 90 + 32
    line = Trajectory(
        token_ids=ids,
        loss_mask=np.ones(num_tokens, bool),
        behaviour_logprobs=np.full(num_tokens, -1.0, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        turn_ids=np.zeros(num_tokens, np.int16),
        task_id=name,
        group_id=name,
        episode_id=f"{name}/0",
        reward=1.0,
    )
    return encode_group(Group(name, name, (line,)))


async def reference(payload: bytes) -> bytes:
    """As Ray gives an actor what was returned by another."""
    return payload


def test_the_loop_goes_on_while_long_episodes_are_written_and_each_line_is_whole(tmp_path: Path):
    """Of several steps at once, too."""
    template = ChatTemplate(letter_tokenizer(), TPL_A)
    num_ticks = 0

    async def go() -> None:
        nonlocal num_ticks
        works: list[Any] = [
            write_episodes(
                [reference(group(f"{step}-{n}", 20_000)) for n in range(2)],
                template,
                tmp_path,
                step,
            )
            for step in (1, 2)
        ]
        task = asyncio.ensure_future(asyncio.gather(*works))
        while not task.done():
            num_ticks += 1
            await asyncio.sleep(0.001)
        task.result()

    asyncio.run(go())
    assert num_ticks > 10
    lines = [json.loads(line) for line in (tmp_path / EPISODES_FILE).read_text().splitlines()]
    assert {(line["step"], line["group_id"]) for line in lines} == {
        (step, f"{step}-{n}") for step in (1, 2) for n in range(2)
    }
    assert {len(line["tokens"]) for line in lines} == {20_000}
