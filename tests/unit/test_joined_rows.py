"""Rows of joined weights: any slice of them is that of the whole, however the parts are cut."""

import pytest
import torch

from areal_ray.engines.joined_rows import JoinedRows

PARTS = (96, 32, 40)
ORDER = torch.randperm(96, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [None, torch.linspace(0.5, 2.0, 24)])
def test_a_slice_across_parts_is_that_of_the_whole(
    sent: torch.dtype, factor: torch.Tensor | None
) -> None:
    parts = [torch.randn(n, 24, generator=torch.Generator().manual_seed(n)).to(sent) for n in PARTS]
    whole = torch.cat([parts[0][ORDER], *parts[1:]]).float()
    if factor is not None:
        whole = whole * factor
    rows = JoinedRows(parts, [ORDER, None, None], factor)
    assert rows.shape == whole.shape
    for cut in (slice(0, 168), slice(0, 64), slice(64, 128), slice(90, 130), slice(128, 168)):
        assert torch.equal(rows.read(cut, torch.empty), whole[cut])


def test_what_lies_as_it_is_wanted_is_not_copied() -> None:
    weight = torch.randn(64, 24)
    read = JoinedRows([weight]).read(slice(8, 16), torch.empty)
    assert read.data_ptr() == weight[8:].data_ptr() and torch.equal(read, weight[8:16])
    for other in (weight.t().contiguous().t(), weight.bfloat16()):
        read = JoinedRows([other]).read(slice(8, 16), torch.empty)
        assert read.is_contiguous() and torch.equal(read, other[8:16].float())
