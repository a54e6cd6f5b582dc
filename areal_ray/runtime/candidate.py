"""A candidate: weights that may become a version, handed out before any replica has them."""

from typing import Any

from areal_ray.core.buckets import BucketPlan
from areal_ray.core.canary import Sent
from areal_ray.runtime.answers import ask
from areal_ray.runtime.canary_vote import check_of
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.weight_files import WeightFile
from areal_ray.runtime.weights_config import WeightsConfig

_LEARNER = "learner"


async def take_candidate(learner: Any, config: WeightsConfig, version: int) -> Committed:
    """The learner's present weights, as a late joiner would get them once they were committed.

    Args:
        learner: Handle of its first rank.
        config: How weights travel.
        version: That they would become. Whatever is published under it replaces them.

    Raises:
        DeadlineExceeded: The learner did not answer in time.
    """
    limit_s = config.timeout_s
    planning = learner.weights_plan.remote(config.bucket_bytes, config.dtype)
    plan: BucketPlan = await ask(_LEARNER, planning, "weights_plan", limit_s)
    sending = learner.weights_send.remote(plan, version, is_candidate=True)
    sent: Sent = await ask(_LEARNER, sending, "weights_send", limit_s)
    payload = learner.weights_snapshot.remote(plan, version)
    answer = await ask(_LEARNER, payload, "weights_snapshot", limit_s)
    snapshot = answer if isinstance(answer, WeightFile) else payload
    return Committed(version, plan, (snapshot,), check_of(config, sent.probe))
