"""A process of its own in which DeepSpeed trains one layer, with each of its stages.

Run as `python -m tests.support.zero_alone`; writes what it saw to stdout, as JSON.
"""

import json
import os
from typing import Any

import torch
from torch import nn

from areal_ray.engines.deepspeed import ZeroSharding
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.train_config import DeepspeedConfig, OptimizerConfig


def train(stage: int, ranks: RankGroup) -> list[dict[str, Any]]:
    """Three updates, the second with a gradient that is not finite."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(7, 3), torch.randn(5, 7)
    sharding = ZeroSharding(DeepspeedConfig(zero_stage=stage), ranks)
    placed = sharding.place(layer, OptimizerConfig(lr=0.1))
    told = []
    for factor in (1.0, float("nan"), 1.0):
        loss = placed.run(layer, inputs).square().mean()
        placed.backward(loss * factor)
        stats = placed.update(0.1)
        weights = [tensor.tolist() for tensor in placed.gathered().values()]
        told.append({"loss": float(loss.detach()), "taken": stats.was_taken, "weights": weights})
    return told


if __name__ == "__main__":
    alone = RankGroup()
    stages = [train(stage, alone) for stage in range(4)]
    print(json.dumps({"stages": stages, "local_rank": os.environ["LOCAL_RANK"]}))
    alone.close()
