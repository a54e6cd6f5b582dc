"""Three ways to hand new weights to an SGLang server, behind one verb.

`stage` runs while the server still samples and does what can be done then; `load` runs while it is
paused. `disk`: a checkpoint folder beside the model's own small files, which the server reads.
`tensor`: the bytes in the request. `distributed`: a broadcast to the server's workers, whose group
is met once; with NCCL it needs a GPU here too.
"""

import asyncio
import base64
import io
import pickle
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from areal_ray.engines.sglang_api import SglangApi
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.errors import EngineError

Tensors = Mapping[str, torch.Tensor]
_GROUP_DEADLINE_S = 120.0


class WeightPath(Protocol):
    """How tensors reach a server."""

    def stage(self, tensors: Tensors, version: int) -> Any:
        """Do what needs no pause; the caller may overwrite its tensors once `load` has returned."""

    async def load(self, staged: Any, version: int, *, flush: bool) -> None:
        """Have the paused server take them and stamp tokens with `version` from now on.

        Args:
            staged: What `stage` returned.
            version: Of these weights.
            flush: Whether the server forgets the keys and values of the weights before.

        Raises:
            EngineError: The server refused; it may hold parts of both versions.
        """

    def close(self) -> None:
        """Leave nothing behind."""


def weight_path(config: SglangGenerationConfig, api: SglangApi, model: Path) -> WeightPath:
    """The one that `rollout.engine.weight_path` names."""
    if config.weight_path == "disk":
        return DiskPath(api, model, config.weights_folder)
    if config.weight_path == "tensor":
        return TensorPath(api, config.bucket_bytes, config.tp_size)
    return GroupPath(api, config)


class DiskPath:
    """Each version is a folder; the one before the last goes when the next is there."""

    def __init__(self, api: SglangApi, model: Path, folder: str) -> None:
        self._api = api
        self._model = model
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._home = Path(tempfile.mkdtemp(prefix="sglang-weights-", dir=folder or None))
        self._last: Path | None = None

    def stage(self, tensors: Tensors, version: int) -> Path:
        """Write the checkpoint folder."""
        from safetensors.torch import save_file

        folder = self._home / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in self._model.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
                shutil.copyfile(file, folder / file.name)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    async def load(self, staged: Path, version: int, *, flush: bool) -> None:
        """Have the server read the folder."""
        body = {
            "model_path": str(staged),
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        await self._api.post("/update_weights_from_disk", body)
        last, self._last = self._last, staged
        if last is not None and last != staged:
            shutil.rmtree(last, ignore_errors=True)

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._home, ignore_errors=True)


class TensorPath:
    """Pickled tensors, base64, in the request: a third more bytes than the weights, and copies."""

    def __init__(self, api: SglangApi, bucket_bytes: int, num_workers: int) -> None:
        self._api = api
        self._bucket_bytes = bucket_bytes
        self._num_workers = num_workers

    def stage(self, tensors: Tensors, version: int) -> list[str]:
        """Pickle bucket by bucket."""
        del version
        return [_pickled(bucket) for bucket in _buckets(tensors, self._bucket_bytes)]

    async def load(self, staged: list[str], version: int, *, flush: bool) -> None:
        """Post the buckets; the last one names the version."""
        async with _update_session(self._api):
            for number, payload in enumerate(staged, 1):
                body: dict[str, Any] = {"serialized_named_tensors": [payload] * self._num_workers}
                body |= _ending(number == len(staged), version, flush)
                await self._api.post("/update_weights_from_tensor", body)

    def close(self) -> None:
        """Nothing is left."""


class GroupPath:
    """A broadcast from this process, rank 0, to the server's workers, ranks 1 and up."""

    def __init__(self, api: SglangApi, config: SglangGenerationConfig) -> None:
        self._api = api
        self._config = config
        self._device = torch.device("cuda" if config.group_backend == "nccl" else "cpu")
        self._group: Any = None

    def stage(self, tensors: Tensors, version: int) -> list[list[tuple[str, torch.Tensor]]]:
        """Bring the tensors where the group's backend sends from."""
        del version
        there = {name: t.detach().to(self._device).contiguous() for name, t in tensors.items()}
        return list(_buckets(there, self._config.bucket_bytes))

    async def load(
        self, staged: list[list[tuple[str, torch.Tensor]]], version: int, *, flush: bool
    ) -> None:
        """Name each bucket to the server and send it at the same time."""
        if self._group is None:
            self._group = await self._meet()
        async with _update_session(self._api):
            for number, bucket in enumerate(staged, 1):
                body: dict[str, Any] = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    "shapes": [list(t.shape) for _, t in bucket],
                    "group_name": self._group.name,
                }
                body |= _ending(number == len(staged), version, flush)
                asked = self._api.post("/update_weights_from_distributed", body)
                await _together(asked, self._group.send, [tensor for _, tensor in bucket])

    async def _meet(self) -> "_SendingGroup":
        group = _SendingGroup(self._config)
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 1 + self._config.tp_size,
            "group_name": group.name,
            "backend": self._config.group_backend,
        }
        await _together(self._api.post("/init_weights_update_group", body), group.meet)
        return group

    def close(self) -> None:
        """Leave the group; the server notices at its next broadcast."""
        if self._group is not None:
            self._group.leave()


class _SendingGroup:
    """Rank 0 of a process group formed as SGLang's workers form theirs, beside any other."""

    def __init__(self, config: SglangGenerationConfig) -> None:
        self.host = "127.0.0.1" if not config.url else _own_address(config.url)
        self.name = f"areal-ray-{id(self):x}"
        self._world_size = 1 + config.tp_size
        self._backend = config.group_backend
        self._timeout = timedelta(seconds=min(_GROUP_DEADLINE_S, config.request_timeout_s))
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self.host, 0, None, True, self._timeout, wait_for_workers=False
        )
        self.port = int(self._store.port)
        self._group: Any = None

    def meet(self) -> None:
        """Wait for the server's workers."""
        from torch.distributed import distributed_c10d as c10d

        # No public call makes a group apart from the default one with keys that others know.
        self._group, _ = c10d._new_process_group_helper(
            self._world_size,
            0,
            [],
            c10d.Backend(self._backend),
            dist.PrefixStore(self.name, self._store),  # type: ignore[attr-defined]
            group_name=c10d.GroupName(self.name),
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._world_size)}

    def send(self, tensors: list[torch.Tensor]) -> None:
        """Broadcast them in order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        if self._backend == "nccl":
            torch.cuda.synchronize()

    def leave(self) -> None:
        """Close the connections."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


async def _together(asked: Awaitable[None], function: Callable[..., None], *args: Any) -> None:
    """A request to the server and the blocking half of the same exchange here."""
    request = asyncio.ensure_future(asked)
    half = _in_thread(function, *args)
    try:
        # A refusal comes at once, while the other half would wait for its deadline.
        await asyncio.wait((request, half), return_when=asyncio.FIRST_EXCEPTION)
        if request.done():
            await request
        await half
        await request
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"sglang weights: the broadcast failed: {error}") from error


def _in_thread(function: Callable[..., None], *args: Any) -> "asyncio.Future[None]":
    """Run what may block until a deadline, without holding up the end of the process."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def told(failure: RuntimeError | ValueError | None) -> None:
        if not ended.done():
            ended.set_result(None) if failure is None else ended.set_exception(failure)

    def work() -> None:
        failure: RuntimeError | ValueError | None = None
        try:
            function(*args)
        except (RuntimeError, ValueError) as error:
            failure = error
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(told, failure)

    threading.Thread(target=work, name="sglang-broadcast", daemon=True).start()
    return ended


@asynccontextmanager
async def _update_session(api: SglangApi) -> AsyncIterator[None]:
    """SGLang opens and closes an update around its parts; one that failed stays open."""
    await api.post("/begin_weight_update", {"selector": "all"})
    yield
    await api.post("/end_weight_update", {})


def _ending(is_last: bool, version: int, flush: bool) -> dict[str, Any]:
    if not is_last:
        return {"flush_cache": False}
    return {"flush_cache": flush, "weight_version": str(version)}


def _buckets(tensors: Tensors, max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Neighbours of at most so many bytes together; a larger tensor is alone."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _pickled(bucket: list[tuple[str, torch.Tensor]]) -> str:
    """As SGLang's MultiprocessingSerializer reads it: by value, not through shared memory."""
    # Cloned: of a view, pickle would take the whole staging buffer along.
    plain = [(name, tensor.detach().cpu().clone()) for name, tensor in bucket]
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump(plain)
    return base64.b64encode(stream.getvalue()).decode()


def _own_address(url: str) -> str:
    """This machine's address as the server at a url sees it."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])
