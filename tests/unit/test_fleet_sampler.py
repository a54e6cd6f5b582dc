"""What a client says of its sampling, beside what a run says."""

import pytest

from areal_ray.core.turn import SamplingWishes
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.runtime.fleet_sampler import sampling_with

OURS = SamplingConfig(temperature=0.7, top_p=0.9, stop=("x",))


@pytest.mark.parametrize(
    ("said", "taken"),
    [(None, 0.7), (0.0, 0.0), (1e-40, 0.01), (0.005, 0.01), (0.5, 0.5), (2.0, 2.0)],
)
def test_a_clients_temperature_is_taken_as_far_as_engines_can_keep_it(said, taken):
    made = sampling_with(OURS, 16, ("y",), said, None, SamplingWishes())
    assert made == SamplingConfig(temperature=taken, top_p=0.9, stop=("y",), max_new_tokens=16)
