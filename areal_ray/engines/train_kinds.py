"""Which `Sharding` the learner's `engine.kind` names; each is imported only where it is used."""

from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.sharding import Replicated, Sharding
from areal_ray.engines.train_config import DeepspeedConfig, FsdpConfig, TrainEngineConfig


def sharding_for(config: TrainEngineConfig, ranks: RankGroup) -> Sharding:
    """Made ready on this rank. Collective."""
    if isinstance(config, FsdpConfig):
        from areal_ray.engines.fsdp import Fsdp

        return Fsdp(config, ranks)
    if isinstance(config, DeepspeedConfig):
        from areal_ray.engines.deepspeed import ZeroSharding

        return ZeroSharding(config, ranks)
    return Replicated(ranks, config.device)
