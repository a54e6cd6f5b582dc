"""Agents' SDKs at a scripted gateway, and what the record has to say of what they did."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from areal_ray.gateway.call_limits import CallLimits
from tests.support.gateway import Gateway, serving

HELLO = "What is 17 plus 25?"
CALL = '<tool_call>{"name": "add", "arguments": {"a" :  17.0}}</tool_call>'
THOUGHT = "<think>\n17+25.\n</think>\n\n"
SHOWS_ALL = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes tools, reasoning and calls."""


def run(script: Any, test: Callable[[Gateway], Awaitable[None]], **options: Any) -> None:
    """Serve the script and let the test at it."""
    options = {"limits": CallLimits(512, 4096), **options}

    async def go() -> None:
        async with asyncio.timeout(120), serving(script, **options) as gateway:
            await test(gateway)

    asyncio.run(go())


def check_extends(gateway: Gateway) -> None:
    """Each prompt is the one before it, what was sampled for that, and something new; all that was
    sampled trains once, in one trajectory.
    """
    requests = gateway.sampler.requests
    log = [gateway.sampler.sampled[request.request_id] for request in requests]
    for before, turn, after in zip(requests, log, requests[1:], strict=False):
        seen = [*before.prompt_ids.tolist(), *turn.token_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(seen)] == seen
        assert len(after.prompt_ids) > len(seen)
    assert not gateway.recorder.splits
    (line,) = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
    trained = line.token_ids[line.loss_mask].tolist()
    assert trained == [token for turn in log for token in turn.token_ids.tolist()]


def prompt_text(gateway: Gateway, index: int = -1) -> str:
    """A prompt as the model saw it."""
    text: str = gateway.sampler.tokenizer.decode(gateway.sampler.requests[index].prompt_ids)
    return text
