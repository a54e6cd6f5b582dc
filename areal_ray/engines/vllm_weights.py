"""Staged weights on their way from the rollout actor to vLLM's own processes on the same node.

On the CPU, and for a replica over several GPUs, the bytes lie in one anonymous memory file that
the processes open through /proc; tensors on a replica's one GPU are shared as they are (CUDA IPC).
Either way nothing is copied while the engine stands still but into the model itself.
"""

import base64
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

_ALIGNMENT = 64
_DEVICE_ARGUMENT = 6
"""Of torch's `rebuild_cuda_tensor`: on which GPU."""

Layout = list[tuple[str, str, list[int], int]]
"""Name, dtype, shape and first byte of each tensor."""


@dataclass(slots=True)
class WeightNote:
    """Where to find the tensors of a version; plain values, since it travels as a message."""

    layout: Layout = field(default_factory=list)
    path: str = ""
    """The memory file."""
    num_bytes: int = 0
    handles: str = ""
    """CUDA IPC handles by name, pickled."""


@contextmanager
def shared_weights(
    tensors: Mapping[str, torch.Tensor], *, on_one_gpu: bool
) -> Iterator[WeightNote]:
    """A note of these tensors that other processes of this node can follow inside the block.

    Args:
        tensors: By name.
        on_one_gpu: Whoever follows it sits on the same GPU as tensors that are on one.
    """
    if on_one_gpu and all(tensor.is_cuda for tensor in tensors.values()):
        yield WeightNote(handles=_cuda_handles(tensors))
        return
    layout: Layout = []
    end = 0
    for name, tensor in tensors.items():
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    file = os.memfd_create("areal-ray-weights")
    try:
        os.ftruncate(file, max(end, 1))
        with mmap.mmap(file, max(end, 1)) as memory:
            _write(memory, layout, tensors)
        yield WeightNote(layout, f"/proc/{os.getpid()}/fd/{file}", end)
    finally:
        os.close(file)


async def open_update(llm: Any, note: WeightNote) -> None:
    """Have vLLM's processes open what a note tells of; requests run on."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest as Update

    await llm.start_weight_update()
    await llm.update_weights(Update({"note": asdict(note)}))


async def finish_update(llm: Any, version: int) -> None:
    """Have them load it, and label the tokens from now on; while vLLM stands still."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest as Update

    await llm.update_weights(Update({"note": {}}))
    await llm.finish_weight_update(weight_version=str(version))


def _write(memory: mmap.mmap, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    places = _views(memory, layout)
    for name, place in places.items():
        place.copy_(tensors[name])
    del places, place  # the mapping cannot close while they look into it


def open_weights(note: WeightNote, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors that a note tells of, as this process sees them; read them only."""
    if note.handles:
        return _cuda_tensors(note.handles, device)
    with open(note.path, "rb") as file:
        # Private: torch wants a buffer that it could write into.
        memory = mmap.mmap(file.fileno(), max(note.num_bytes, 1), access=mmap.ACCESS_COPY)
    return _views(memory, note.layout)


def _views(memory: mmap.mmap, layout: Layout) -> dict[str, torch.Tensor]:
    views = {}
    for name, dtype, shape, first in layout:
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        if count:
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=first)
        else:
            flat = torch.empty(0, dtype=kind)
        views[name] = flat.view(shape)
    return views


def _cuda_handles(tensors: Mapping[str, torch.Tensor]) -> str:
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()  # what was staged on another stream is there
    shared = {name: reduce_tensor(t)[1] for name, t in tensors.items()}  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps(shared)).decode("ascii")


def _cuda_tensors(handles: str, device: torch.device) -> dict[str, torch.Tensor]:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    tensors = {}
    for name, arguments in pickle.loads(base64.b64decode(handles)).items():
        placed: list[Any] = list(arguments)
        placed[_DEVICE_ARGUMENT] = device.index or 0  # as this process numbers it
        tensors[name] = rebuild_cuda_tensor(*placed)  # type: ignore[no-untyped-call]
    return tensors
