"""The first contact with an SGLang server: it is up, new enough, and holds the right weights."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

from areal_ray.engines.sglang_api import ServerUnreachable, SglangApi
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.sglang_model import SglangModel
from areal_ray.errors import EngineDied, EngineError

_OLDEST = (0, 5, 23)
"""The API this package was written against; older ones stamp tokens in other ways."""
_ASK_AGAIN_S = 0.3


async def connect(
    api: SglangApi,
    config: SglangGenerationConfig,
    model: SglangModel,
    version: int,
    why_ended: Callable[[], str],
) -> None:
    """Wait for the server, check it, and have it hold the model's weights as `version`.

    Args:
        api: Its client.
        config: The recipe's section.
        model: What the server shall serve.
        version: Of the weights in the model's folder.
        why_ended: Empty while the server's process runs; else how it ended.

    Raises:
        EngineDied: Its process ended.
        EngineError: It does not answer in time, or is not one that can be used.
    """
    said = await _answered(api, config.start_timeout_s, why_ended)
    _check(said, config, model, api.url)
    stamped = str((await api.get("/model_info")).get("weight_version"))
    if config.url:
        await api.post("/continue_generation", {})  # who used it before may have left it paused
        if stamped != str(version):
            # Its weights are of another run, or of this replica's life before: never believed.
            body = {
                "model_path": str(model.folder),
                "weight_version": str(version),
                "abort_all_requests": True,
                "flush_cache": True,
            }
            await api.post("/update_weights_from_disk", body)
    await _probe(api, version)


async def _answered(api: SglangApi, limit_s: float, why_ended: Callable[[], str]) -> dict[str, Any]:
    """/server_info once it is there."""
    deadline = time.monotonic() + limit_s
    while True:
        if why := why_ended():
            raise EngineDied(f"sglang generation engine: {why}")
        try:
            return await api.get("/server_info", num_retries=0)
        except ServerUnreachable as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"sglang generation engine: {api.url} does not answer within "
                    f"start_timeout_s = {limit_s:g}: {error}"
                ) from error
        await asyncio.sleep(_ASK_AGAIN_S)


def _check(
    said: dict[str, Any], config: SglangGenerationConfig, model: SglangModel, url: str
) -> None:
    version = str(said.get("version"))
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
    wrong = []
    if numbers < _OLDEST:
        wrong.append(f"it is SGLang {version}, must be {'.'.join(map(str, _OLDEST))} or newer")
    if said.get("tp_size", 1) != config.tp_size:
        wrong.append(
            f"tp_size is {said.get('tp_size')}, must be rollout.engine.tp_size {config.tp_size}"
        )
    if said.get("dp_size", 1) != 1:
        wrong.append(f"dp_size is {said['dp_size']}, must be 1: one server a replica")
    if said.get("preferred_sampling_params"):
        wrong.append("it has preferred_sampling_params, must have none")
    length = said.get("context_length")
    if length and length < model.window_tokens:
        wrong.append(
            f"context_length is {length}, max_context_tokens {model.window_tokens}: lower it"
        )
    if wrong:
        raise EngineError(f"sglang generation engine: the server at {url}: {'; '.join(wrong)}.")


async def _probe(api: SglangApi, version: int) -> None:
    """One token, to see log-probs and the stamp before a run depends on them."""
    sampled = await api.generate(
        {
            "input_ids": [0],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "extra_key": "probe",
        }
    )
    if sampled.version != str(version):
        raise EngineError(
            f"sglang generation engine: the server at {api.url} stamps a token with version "
            f"{sampled.version}, must be {version}."
        )
