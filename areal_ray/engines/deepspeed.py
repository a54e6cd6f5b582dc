"""DeepSpeed: ZeRO lays optimizer state, gradient and weights of a learner's models over its ranks.

Imported only where `learner.engine.kind` is deepspeed. Passes, schedule, clipping and the guard
against a gradient that is not finite are the torch engine's, to the last digits of float32.
Nothing is compiled: of DeepSpeed's C++ operations, the reduction for inference on CPUs is left
out, and the optimizer is torch's.
Waits for: the other ranks, in every pass.
"""

import logging
import os
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from areal_ray.engines.deepspeed_settings import deepspeed_problem, reports
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.sharding import PlacedModel, ReplicatedModel
from areal_ray.engines.tensor_parts import PartGroup
from areal_ray.engines.train_config import DeepspeedConfig, OptimizerConfig
from areal_ray.engines.zero_model import WeightShardedModel, ZeroModel
from areal_ray.errors import EngineError

_joined: list[Any] = []
"""The process group that deepspeed knows."""


class ZeroSharding:
    """Places models by DeepSpeed; see `Sharding`."""

    sequence = None

    def __init__(self, config: DeepspeedConfig, ranks: RankGroup) -> None:
        """Import and set up deepspeed in this process. Collective.

        Raises:
            EngineError: The package is missing, or of a release that was never tried.
        """
        ranks.initialise_alone()
        _set_up(config.device, is_quiet=not reports(config.config))
        self._config = config
        self._ranks = ranks
        splits_weights = config.zero_stage == 3
        self.loads_to: str = config.device
        if splits_weights:  # rank 0 reads the checkpoint, and hands out layer after layer
            self.loads_to = "cpu" if ranks.rank == 0 else "meta"
        self.is_sharded = splits_weights and ranks.size > 1
        # A publish reads on a thread of its own, beside the engine's.
        self._published = PartGroup(
            ranks if splits_weights else RankGroup(), config.collective_timeout_s
        )

    def agreed(self, answers: tuple[bool, ...]) -> tuple[bool, ...]:
        """See `Sharding`; nothing is true of a model that a rank does not have."""
        return tuple(map(bool, self._ranks.max_numbers([float(a) for a in answers])))

    def place(self, module: nn.Module, optimizer: OptimizerConfig | None = None) -> PlacedModel:
        """See `Sharding`; a model that never changes is shared out with stage 3 alone."""
        if optimizer is None and self._config.zero_stage < 3:
            return ReplicatedModel(module, None, self._ranks)
        if self._config.zero_stage == 3:
            return WeightShardedModel(module, optimizer, self._config, self._published)
        return ZeroModel(module, optimizer, self._config, self._ranks)


def _set_up(device: str, *, is_quiet: bool) -> None:
    """Import deepspeed for this device, with nothing to find out by itself."""
    problem = deepspeed_problem()
    if problem is not None:
        raise EngineError(f"learner.engine.kind: {problem}")
    # Ray shows a process its own GPU alone: that is device 0, whatever the rank.
    os.environ["LOCAL_RANK"] = "0"
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if comm.cdb is not None and _joined[-1:] != [dist.group.WORLD]:
        comm.cdb = None  # of a group that this process has left
        groups._release_process_group_references(None)
    _joined[:] = [dist.group.WORLD]
    groups._WORLD_GROUP = dist.group.WORLD  # its time-out holds; a clone's would be 30 minutes
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR if is_quiet else logging.INFO)
    warnings.filterwarnings("ignore", message="`torch.distributed..*` is deprecated")
    # A reduction for inference on CPUs, which training never calls and takes a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
