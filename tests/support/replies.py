"""What a reward sees of a reply, without its tokens."""

import numpy as np

from areal_ray.core.trajectory import Trajectory


def replied(text: str) -> Trajectory:
    """A trajectory that ended with this text and holds no tokens."""
    return Trajectory(
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        behaviour_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        turn_ids=np.zeros(0, np.int16),
        task_id="row-7",
        group_id="g",
        episode_id="e",
        final_text=text,
    )
