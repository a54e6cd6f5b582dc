"""The SGLang adapter's knobs, apart from it: reading a recipe needs neither torch nor aiohttp."""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from areal_ray.core.config import Config

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
OWN_ARGUMENTS = frozenset(
    {
        *("model_path", "model", "host", "port", "tp_size", "dtype"),
        *("device", "base_gpu_id", "context_length", "weight_version", "skip_tokenizer_init"),
        *("incremental_streaming_output", "enable_memory_saver", "api_key", "admin_api_key"),
    }
)
"""Server arguments that the adapter sets, from the other keys of its section."""


class SglangGenerationConfig(Config):
    """An SGLang server over its HTTP API: one that the replica starts, or one at a url."""

    kind: Literal["sglang"] = "sglang"
    """Which engine this section configures."""
    url: str = ""
    """http://host:port of a running server that nobody else uses; empty = the replica starts one
    and ends it."""
    python: str = ""
    """Interpreter of the environment that has SGLang, which pins a torch of its own; empty =
    this one."""
    device: str = "auto"
    """Of a server we start: cpu, cuda, cuda:1, ...; auto = what SGLang finds."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of a server we start; auto = the checkpoint's own."""
    tp_size: int = Field(1, ge=1)
    """GPUs that share a server's model, also of one at a url. For a server that the replica starts,
    rollout.num_gpus must be as many."""
    max_context_tokens: int = Field(0, ge=0)
    """Prompt and sampled tokens of one turn; 0 = what the model allows, at most 8192."""
    max_in_flight: int = Field(256, ge=1)
    """Turns at the server at once; further ones wait in the replica."""
    memory_saver: bool = False
    """Start the server so that `sleep` can free its KV cache (needs torch_memory_saver there)."""
    args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of a server we start, as SGLang names them: mem_fraction_static: 0.8."""
    weight_path: Literal["disk", "tensor", "distributed"] = "disk"
    """How new weights reach the server: a checkpoint folder that it reads, bytes in the request
    (small models), or a broadcast over NCCL."""
    weights_folder: str = ""
    """Where `disk` writes; the server must see it. Empty = a temporary folder of this machine."""
    bucket_bytes: int = Field(256 * 2**20, ge=2**20)
    """Tensors of so many bytes travel in one request of `tensor` and `distributed`."""
    group_backend: Literal["nccl", "gloo"] = "nccl"
    """Of the group that `distributed` broadcasts over."""
    start_timeout_s: float = Field(900.0, gt=0.0)
    """A server that does not answer by then is given up."""
    request_timeout_s: float = Field(1800.0, gt=0.0)
    """A turn, or a weight update, may take so long."""
    num_retries: int = Field(5, ge=0)
    """A request that met a busy or unreachable server (503, 429, no connection) is sent again so
    often, with growing pauses; then the server counts as gone."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device) is None:
            raise ValueError(f"is {device!r}; must be auto, cpu, cuda or cuda:N")
        return device

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"is {url!r}; must be http://host:port")
        return url.rstrip("/")

    @field_validator("args")
    @classmethod
    def _check_args(
        cls, args: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        for name in args:
            if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
                raise ValueError(f"has the key {name!r}; must be as in SGLang: mem_fraction_static")
            if name in OWN_ARGUMENTS:
                raise ValueError(f"has the key {name!r}, which the adapter sets from other keys")
        return args

    @model_validator(mode="after")
    def _check_place(self) -> "SglangGenerationConfig":
        if not self.url:
            return self
        unread = [name for name in ("python", "args", "memory_saver") if getattr(self, name)]
        unread += [name for name in ("device", "dtype") if getattr(self, name) != "auto"]
        if unread:
            raise ValueError(
                f"has url and {', '.join(unread)}, which only shape a server that the replica "
                "starts; must be left out with a url"
            )
        is_here = urlsplit(self.url).hostname in _LOOPBACK
        if self.weight_path == "disk" and not self.weights_folder and not is_here:
            raise ValueError(
                "has weight_path: disk and a server on another machine; weights_folder must name a "
                "folder that both see"
            )
        return self
