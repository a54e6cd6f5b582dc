"""Large tensors are put and proven in slices on several threads, as small ones are at once."""

import pytest
import torch

from areal_ray.engines.lean_room import ProvingRoom, Room, address

CPU = torch.device("cpu")
ROWS, COLUMNS = 4097, 1024
"""17 MB in float32: several spans, the last of one row alone."""


def _source(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS).to(dtype)


def _factor() -> torch.Tensor:
    return torch.linspace(0.5, 1.5, COLUMNS)


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_what_is_put_is_the_whole_source_and_is_proven_to_the_last_bit(sent: torch.dtype) -> None:
    source = _source(sent)
    with Room([], [], torch.float32, CPU) as room:
        plain = room.copy(source)
        scaled = room.take(ROWS, COLUMNS)
        room.put(scaled, source, _factor())
    assert torch.equal(plain, source.float())
    assert torch.equal(scaled, source * _factor())
    for altered in (None, plain, scaled):
        if altered is not None:
            altered[-1, -1].view(torch.int32).bitwise_xor_(1)
        with ProvingRoom(room.blocks, [], torch.float32, CPU) as proving:
            proving.copy(source)
            proving.put(proving.take(ROWS, COLUMNS), source, _factor())
        expected = {plain: {address(plain)}, scaled: {address(plain), address(scaled)}}
        assert proving.differing == (set() if altered is None else expected[altered])
    assert torch.equal(source, _source(sent))


def test_memory_of_an_earlier_version_is_written_over_in_the_order_it_was_taken() -> None:
    with Room([], [], torch.float32, CPU) as first:
        first.copy(torch.zeros(3))
        first.copy(_source())
    with Room(first.blocks, [], torch.float32, CPU) as second:
        second.copy(torch.ones(3))
        second.copy(_source() + 1)
    assert [*map(address, second.blocks)] == [*map(address, first.blocks)]
    assert torch.equal(first.blocks[1], _source() + 1)


def test_a_failure_on_another_thread_is_the_callers() -> None:
    def put_narrower() -> None:
        with Room([], [], torch.float32, CPU) as room:
            room.put(room.take(ROWS, COLUMNS), torch.zeros(ROWS, 7))

    with pytest.raises(RuntimeError, match="must match"):
        put_narrower()
