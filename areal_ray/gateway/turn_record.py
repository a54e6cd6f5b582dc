"""One turn as it is written down, so that a record survives its process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import Reply


class ReplyReader(Protocol):
    """Reads sampled tokens back; `reply_parser.ReplyFormat` is one."""

    def decode(self, ids: Any) -> str:
        """Text of sampled ids [N]."""

    def read(self, text: str, tools: Any, prompt_ids: Any, key: str = "") -> Reply:
        """What `text` says to a prompt; the same key gives the same ids of tool calls."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What a closed or broken-off turn added to its episode. Replay them in their order.

    All but the arrays are JSON values.
    """

    turn_id: int
    handle: str
    after: int
    """Turn whose conversation, its reply included, this one shares messages with; -1 = none."""
    num_kept: int
    """Messages shared with it, from the first on."""
    messages: tuple[Mapping[str, Any], ...]
    """Those that follow, canonical, up to the prompt's end."""
    reply: Mapping[str, Any]
    """The sampled message, canonical."""
    base: int
    """Turn whose ids, prompt and samples, this prompt begins with; -1 = none."""
    num_shared: int
    """How many ids of it."""
    added_ids: NDArray[np.int32]
    """[P] ids of the prompt after those."""
    token_ids: NDArray[np.int32]
    """[N] sampled"""
    logprobs: NDArray[np.float32]
    """[N]"""
    versions: NDArray[np.int32]
    """[N]"""
    stop_reason: StopReason
    facts: Mapping[str, Any]
    """JSON: what else the recorder has to know again."""
