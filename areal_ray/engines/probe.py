"""The learner's half of the canary: log-probs of a fixed prompt under the weights it trains."""

import numpy as np

from areal_ray.algorithms.packing import TrainSequence
from areal_ray.core.canary import Probe, probe_tokens
from areal_ray.core.context_window import LARGEST_TOKENS, allowed_tokens
from areal_ray.engines.frozen import sequence_logprobs
from areal_ray.engines.row_forward import RowForward

_WINDOW_FIELDS = ("max_position_embeddings", "sliding_window", "layer_types")


def take_probe(forward: RowForward, num_tokens: int) -> Probe:
    """The probe under the present weights: one forward pass of one row, alike on all ranks.

    Args:
        forward: Of the model that trains.
        num_tokens: Length of the prompt; what the model's window does not hold is cut.
    """
    text = forward.text_config
    window = allowed_tokens(*(getattr(text, name, None) for name in _WINDOW_FIELDS))
    token_ids = probe_tokens(int(text.vocab_size), min(num_tokens, window or LARGEST_TOKENS))
    trained = np.ones(len(token_ids), dtype=np.bool_)
    trained[0] = False
    column = sequence_logprobs(forward, [TrainSequence(token_ids, trained, 0)], 1.0)
    return Probe(token_ids, column.float().cpu().numpy(), (forward.dtype,))
