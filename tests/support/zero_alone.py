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

HOW = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "stage 2, offloaded": {"zero_stage": 2, "offload": "optimizer"},
    "stage 3, offloaded": {"zero_stage": 3, "offload": "all"},
}


def train(ranks: RankGroup, **how: Any) -> dict[str, Any]:
    """Three updates, the second with a gradient that is not finite."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(7, 3), torch.randn(5, 7)
    sharding = ZeroSharding(DeepspeedConfig(**how), ranks)
    placed = sharding.place(layer, OptimizerConfig(lr=0.1))
    told = []
    for factor in (1.0, float("nan"), 1.0):
        loss = placed.run(layer, inputs).square().mean()
        placed.backward(loss * factor)
        stats = placed.update(0.1)
        weights = [tensor.tolist() for tensor in placed.gathered().values()]
        told.append({"loss": float(loss.detach()), "taken": stats.was_taken, "weights": weights})
    zero = placed._engine.config["zero_optimization"]  # what DeepSpeed goes by
    return {"steps": told, "offloads": [key for key in zero if key.startswith("offload_")]}


if __name__ == "__main__":
    alone = RankGroup()
    found = {name: train(alone, **how) for name, how in HOW.items()}
    print(json.dumps({"found": found, "local_rank": os.environ["LOCAL_RANK"]}))
    alone.close()
