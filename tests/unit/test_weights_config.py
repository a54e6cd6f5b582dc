"""Which backend weights travel by."""

import pytest

from areal_ray.runtime.weights_config import WeightsConfig


@pytest.mark.parametrize(
    ("said", "learner", "rollout", "expected"),
    [
        ("auto", 0, 0, "gloo"),
        ("auto", 1, 0.5, "gloo"),
        ("auto", 1, 0, "gloo"),
        ("auto", 1, 2, "nccl"),
        ("gloo", 1, 1, "gloo"),
        ("nccl", 0, 0, "nccl"),
    ],
)
def test_nccl_is_taken_where_each_member_has_a_gpu_of_its_own(said, learner, rollout, expected):
    config = WeightsConfig(backend=said, bucket_bytes=4096)
    placed = config.placed(learner_gpus=learner, rollout_gpus=rollout)
    assert (placed.backend, placed.bucket_bytes) == (expected, 4096)
