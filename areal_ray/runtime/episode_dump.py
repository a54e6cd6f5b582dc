"""Episodes of a step, written down for the report by one of the actors that render text.

Beside its event loop: calls of the model and questions how it does are answered meanwhile.
"""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_ray.core.trajectory import decode_group
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.cluster import environment_secrets
from areal_ray.telemetry.episodes import EpisodeLog, episode_lines, without_secrets

_WRITING = threading.Lock()  # of one group after the other, whichever step they are of


async def write_episodes(
    payloads: Sequence[Any], template: ChatTemplate, folder: Path, step: int
) -> None:
    """Append the episodes of groups that `step` trained on to episodes.jsonl, without secrets.

    Args:
        payloads: References to encoded groups.
        template: Whose tokens they are made of.
        folder: Of the run.
        step: Steps done when they were trained on.
    """
    secrets = environment_secrets()

    def texts(ids: Sequence[int]) -> list[str]:
        return [template.token_text(token_id) for token_id in ids]

    def write(payload: bytes) -> None:
        lines = episode_lines(decode_group(payload), texts, step)
        shown = [without_secrets(line, secrets) for line in lines] if secrets else lines
        with _WRITING:
            EpisodeLog.append(folder, shown)

    for payload in payloads:
        await asyncio.to_thread(write, await payload)
