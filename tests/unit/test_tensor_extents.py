"""Which elements of a flattened tensor a rank holds, by counting them one by one."""

import pytest
import torch

from areal_ray.engines.tensor_parts import Extent

WHOLE = torch.arange(6 * 8)


@pytest.mark.parametrize(
    ("extent", "held"),
    [
        (Extent(0, 48), range(48)),
        (Extent(16, 16), range(16, 32)),
        (Extent(48, 0), []),
        (Extent(4, 4, 6, 8), [r * 8 + c for r in range(6) for c in range(4, 8)]),
        (Extent(2 * 8 + 2, 3, 2, 8), [r * 8 + c for r in (2, 3) for c in (2, 3, 4)]),
        (Extent(40, 4, 0, 8), []),
    ],
)
def test_an_extent_is_the_elements_it_names(extent, held):
    held = list(held)
    assert extent.size == len(held)
    assert WHOLE[extent.places(0, extent.size)].tolist() == held
    for place in range(49):
        assert extent.before(place) == sum(index < place for index in held), place
    low, high = extent.before(13), extent.before(37)
    assert WHOLE[extent.places(low, high)].tolist() == [i for i in held if 13 <= i < 37]
