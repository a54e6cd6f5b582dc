"""Log-probs of given tokens, teacher forced, by a generation engine's own forward.

Called by the torch generation engine between two steps; over a cache of its own, so that what runs
is not touched.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.generation_model import GenerationModel
from areal_ray.engines.kv_cache import CacheLimits, KVCache
from areal_ray.engines.token_block import TokenBlock
from areal_ray.errors import EngineError

_MOST_LOGITS = 2**24


def check_scorable(model: GenerationModel, token_ids: NDArray[np.int32]) -> None:
    """Raise EngineError unless the model can read these ids."""
    wrong = model.why_ids_refused(token_ids, model.window_tokens)
    if wrong:
        raise EngineError(f"score: {wrong}")


def score(
    model: GenerationModel, token_ids: NDArray[np.int32], part_tokens: int = 0
) -> NDArray[np.float32]:
    """[T-1] log-prob at temperature 1 of each token [T] but the first, given those before it.

    `part_tokens` are computed at a time; 0 = as many as give some 64 MB of logits.
    """
    num_tokens = len(token_ids)
    if num_tokens == 1:
        return np.empty(0, np.float32)
    limits = CacheLimits(1, num_tokens, 2**62)
    cache = KVCache(model.forward.cache_shape, limits, model.dtype, model.device)
    cache.reserve(1, num_tokens)
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(model.device)
    part, scored = part_tokens or max(1, _MOST_LOGITS // model.vocab_size), []
    for start in range(0, num_tokens - 1, part):
        end = min(start + part, num_tokens - 1)
        block = TokenBlock(
            token_ids=ids[None, start:end],
            positions=torch.arange(start, end, device=model.device)[None],
            last=None,
            first_row=0,
            num_tokens=end,
            is_fresh=start == 0,
        )
        logits = model.forward.logits(block, cache).float()
        logprobs = torch.log_softmax(logits, -1)
        scored.append(logprobs.gather(1, ids[start + 1 : end + 1, None])[:, 0])
    return torch.cat(scored).cpu().numpy()
