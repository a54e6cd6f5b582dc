"""A scripted SGLang server: its HTTP protocol over real sockets, with a real tiny model inside.

Routes and fields follow SGLang 0.5.23. The scheduler is as plain as can be: one forward over all
running sequences a step, without a cache, so weights act at once on every token that follows. What
SGLang does that an adapter can trip over is kept: a pause in mode abort looks once a second whether
all requests are gone, one that comes while paused waits at the door, an abort ends a request after
its next token and hits every id that begins with the given one, weights change in a session.

`ScriptedServer` runs in a thread of the test; `python -m tests.support.sglang_server` with the
options of `sglang.launch_server` runs one as a process.
"""

import argparse
import asyncio
import base64
import io
import json
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.5.23"


@dataclass(eq=False)
class Request:
    """One /generate on its way."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    body: dict[str, Any]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    to_abort: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Brain:
    """The model and how a token is drawn."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        said = json.loads((folder / "generation_config.json").read_text())
        eos = said.get("eos_token_id")
        self.eos = set(eos if isinstance(eos, list) else [eos]) - {None}
        self.context = self.model.config.max_position_embeddings

    def step(self, requests: list[Request]) -> None:
        """One token for each; prompt log-probs where they are asked for."""
        rows = [torch.tensor(r.prompt + r.output) for r in requests]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits.float()
        for request, row, table in zip(requests, rows, logits, strict=True):
            if request.body.get("logprob_start_len", -1) == 0 and not request.prompt_logprobs:
                told = torch.log_softmax(table[: len(row) - 1], -1)
                request.prompt_logprobs = told.gather(1, row[1:, None])[:, 0].tolist()
            self._draw(request, table[len(row) - 1])

    def _draw(self, request: Request, logits: torch.Tensor) -> None:
        params = request.params
        temperature, top_k = params.get("temperature", 1.0), params.get("top_k", -1)
        if temperature == 0.0:
            temperature, top_k = 1.0, 1
        logprobs = torch.log_softmax(logits / temperature, -1)
        order = torch.argsort(logprobs, descending=True)
        mass = logprobs[order].exp()
        kept = torch.cumsum(mass, 0) - mass < params.get("top_p", 1.0)
        kept &= mass >= params.get("min_p", 0.0) * mass[0]
        if top_k > 0:
            kept[top_k:] = False
        allowed = mass * kept
        position = len(request.prompt) + len(request.output)
        random = np.random.default_rng([params.get("sampling_seed") or 0, position]).random()
        place = int(torch.searchsorted(torch.cumsum(allowed, 0), random * float(allowed.sum())))
        token = int(order[min(place, int(kept.sum()) - 1)])
        request.output.append(token)
        request.logprobs.append(float(logprobs[token]))
        likely = order[: request.body.get("top_logprobs_num", 0)].tolist()
        request.tops.append([[float(logprobs[one]), one, None] for one in likely])

    def load_folder(self, folder: Path) -> None:
        """Weights of a checkpoint folder."""
        from safetensors.torch import load_file

        for file in folder.glob("*.safetensors"):
            self.load(load_file(file))

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Weights by name; unknown names are refused."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in own:
                    own[name].copy_(tensor)
                elif name != "lm_head.weight":
                    raise KeyError(f"no parameter {name}")


class ScriptedServer:
    """The protocol around a brain. `faults` is consulted first for each /generate."""

    def __init__(self, folder: Path, *, version: str = "default", step_s: float = 0.0) -> None:
        self.brain = Brain(folder)
        self.model_path = str(folder)
        self.version = version
        self.step_s = step_s
        self.step_allowed: Callable[[], bool] = lambda: True
        self.info: dict[str, Any] = {
            "version": VERSION, "tp_size": 1, "dp_size": 1, "context_length": None,
            "preferred_sampling_params": None, "incremental_streaming_output": False,
        }  # fmt: skip
        self.is_incremental = False
        self.faults: deque[Callable[[dict[str, Any]], web.StreamResponse | None]] = deque()
        self.spoil: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[str, Request] = {}
        self.is_paused = self.is_updating = False
        self.released: list[str] = []
        self._gone_on = asyncio.Event()
        self._gone_on.set()
        self._groups: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    # -- serving --------------------------------------------------------------------------------

    async def listen(self, port: int = 0) -> None:
        """Serve until the loop ends."""
        app = web.Application(client_max_size=2**30)
        for route in ("/server_info", "/model_info", "/health"):
            app.router.add_get(route, self._get)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{verb}", self._verb)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._steps = asyncio.ensure_future(self._scheduler())

    async def stop(self) -> None:
        """Close every connection."""
        self._steps.cancel()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def _scheduler(self) -> None:
        while True:
            live = [] if self.is_paused or not self.step_allowed() else list(self.running.values())
            if not live:
                await asyncio.sleep(0.005)
                continue
            self.brain.step(live)
            for request in live:
                self._after_step(request)
            await asyncio.sleep(self.step_s)

    def _after_step(self, request: Request) -> None:
        params, output = request.params, request.output
        if params["max_new_tokens"] == 0:
            output.clear()
            request.logprobs.clear()
            request.tops.clear()
        elif request.spans and request.spans[-1][0] == self.version:
            request.spans[-1][2] = len(output)
        else:
            request.spans.append([self.version, len(output) - 1, len(output)])
        stops = self.brain.eos | set(params.get("stop_token_ids") or ())
        if request.to_abort:  # beats every other reason, as in SGLang
            self._end(request, {"type": "abort", "message": "Aborted", "status_code": None})
        elif output and output[-1] in stops and not params.get("ignore_eos"):
            self._end(request, {"type": "stop", "matched": output[-1]})
        elif len(output) >= params["max_new_tokens"]:
            self._end(request, {"type": "length", "length": len(output)})
        request.changed.set()

    def _end(self, request: Request, finish: dict[str, Any]) -> None:
        request.finish = finish
        self.running.pop(request.rid, None)
        request.changed.set()

    async def _get(self, request: web.Request) -> web.Response:
        if request.path == "/server_info":
            return web.json_response(self.info)
        told = {"model_path": self.model_path, "weight_version": self.version}
        return web.json_response(told if request.path == "/model_info" else {})

    # -- /generate ------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.calls.append(("generate", body))
        if self.released:
            return web.json_response({"error": "the KV cache is released"}, status=500)
        if self.faults and (answer := self.faults.popleft()(body)) is not None:
            return answer
        await self._gone_on.wait()
        params = {"max_new_tokens": 128, **body["sampling_params"]}
        if len(body["input_ids"]) + params["max_new_tokens"] > self.brain.context:
            message = {"error": {"message": "longer than the model's context length"}}
            return web.json_response(message, status=400)
        room = self.brain.context - 2 - len(body["input_ids"])  # SGLang keeps two for itself
        params["max_new_tokens"] = max(0, min(params["max_new_tokens"], room))
        request = Request(
            body.get("rid") or f"own-{time.time_ns()}", body["input_ids"], params, body
        )
        self.running[request.rid] = request
        if body.get("stream"):
            return await self._stream(http, request)
        try:
            while request.finish is None:
                await request.changed.wait()
                request.changed.clear()
        finally:
            self.running.pop(request.rid, None)
        return web.json_response(self.spoil(self._answer(request, 0)))

    async def _stream(self, http: web.Request, request: Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(http)
        told = 0
        try:
            while True:
                await request.changed.wait()
                request.changed.clear()
                first = told if self.is_incremental else 0
                answer = self.spoil(self._answer(request, first))
                told = len(request.output)
                await stream.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
                if request.finish is not None:
                    break
            await stream.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            pass  # the client left: its request ends with it
        finally:
            self.running.pop(request.rid, None)
        return stream

    def _answer(self, request: Request, first: int) -> dict[str, Any]:
        pairs = zip(request.logprobs, request.output, strict=True)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "weight_version": self.version,
        }
        if request.body.get("return_logprob"):
            meta["output_token_logprobs"] = [[lp, token, None] for lp, token in pairs][first:]
            if request.body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = request.tops  # of all tokens in any stream
        if request.prompt_logprobs:
            told = zip([None, *request.prompt_logprobs], request.prompt, strict=True)
            meta["input_token_logprobs"] = [[lp, token, None] for lp, token in told]
        if request.finish is not None and request.spans:
            named = ("version", "start", "end")
            meta["weight_versions"] = [dict(zip(named, s, strict=True)) for s in request.spans]
            meta["weight_version"] = request.spans[-1][0]
        return {"output_ids": request.output[first:], "meta_info": meta}

    # -- control --------------------------------------------------------------------------------

    async def _verb(self, http: web.Request) -> web.Response:
        verb = http.match_info["verb"]
        body = json.loads(await http.text() or "{}")
        self.calls.append((verb, body))
        served = getattr(self, f"_on_{verb}", None)
        if served is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            answer = await served(body)
        except (KeyError, ValueError, RuntimeError) as error:
            return web.json_response({"success": False, "message": repr(error)}, status=400)
        return web.json_response(answer)

    async def _on_pause_generation(self, body: dict[str, Any]) -> Any:
        self._gone_on.clear()
        if body.get("mode", "abort") != "abort":
            raise ValueError("the adapter is expected to pause in mode abort")
        while True:
            await self._on_abort_request({"abort_all": True})
            if not self.running:
                break
            await asyncio.sleep(1.0)
        self.is_paused = True
        return {"status": "ok"}

    async def _on_continue_generation(self, body: dict[str, Any]) -> Any:
        self.is_paused = False
        self._gone_on.set()
        return {"status": "ok"}

    async def _on_abort_request(self, body: dict[str, Any]) -> Any:
        for rid, request in self.running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                request.to_abort = True  # ends it after its next token
        return None

    async def _on_update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        self.brain.load_folder(Path(body["model_path"]))
        self.model_path = body["model_path"]
        return self._updated(body)

    async def _on_begin_weight_update(self, body: dict[str, Any]) -> Any:
        if self.is_updating:
            raise ValueError("a weight-update session is already open")
        self.is_updating = True
        return {"success": True}

    async def _on_end_weight_update(self, body: dict[str, Any]) -> Any:
        self.is_updating = False
        return {"success": True}

    async def _on_update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        self._check_session()
        stream = io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0]))
        self.brain.load(dict(pickle.Unpickler(stream).load()))
        return self._updated(body)

    async def _on_init_weights_update_group(self, body: dict[str, Any]) -> Any:
        group = await asyncio.get_running_loop().run_in_executor(None, _joined, body)
        self._groups[body["group_name"]] = group
        return {"success": True, "message": "Succeeded"}

    async def _on_update_weights_from_distributed(self, body: dict[str, Any]) -> Any:
        self._check_session()
        group = self._groups[body["group_name"]]
        loop = asyncio.get_running_loop()
        self.brain.load(await loop.run_in_executor(None, _received, group, body))
        return self._updated(body)

    async def _on_release_memory_occupation(self, body: dict[str, Any]) -> Any:
        if self.running:
            raise ValueError("release_memory_occupation should be called only when idle")
        self.released = body["tags"]
        return None

    async def _on_resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        self.released = []
        return None

    def _check_session(self) -> None:
        if not self.is_updating:
            raise ValueError("must run between begin_weight_update() and end_weight_update()")

    def _updated(self, body: dict[str, Any]) -> Any:
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "Succeeded to update model weights."}


def _joined(body: dict[str, Any]) -> Any:
    """As SGLang's workers join: by a store at the master's address, under the group's name."""
    from torch.distributed import distributed_c10d as c10d

    url = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(c10d.rendezvous(url, body["rank_offset"], body["world_size"]))
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(body["backend"]),
        c10d.PrefixStore(body["group_name"], store), group_name=body["group_name"],
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    return group


def _received(group: Any, body: dict[str, Any]) -> dict[str, torch.Tensor]:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    found = {}
    for name, kind, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        found[name] = torch.empty(shape, dtype=getattr(torch, kind))
        group.broadcast([found[name]], options).wait()
    return found


@contextmanager
def scripted_server(folder: Path, **settings: Any) -> Iterator[ScriptedServer]:
    """A server in a thread, closed at the end."""
    server = ScriptedServer(folder, **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.listen(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def write_interpreter(folder: Path, before: str = "") -> str:
    """A program in `folder` whose `-m sglang.launch_server` is the scripted server.

    `before` is what it does first, in the shell's language.
    """
    script = folder / "python"
    script.write_text(
        f"#!/bin/sh\n{before}\nshift 2\ncd '{ROOT}'\n"
        f"exec '{sys.executable}' -m tests.support.sglang_server \"$@\"\n"
    )
    script.chmod(0o755)
    return str(script)


def server_below(process: int) -> int:
    """The process of a server that the adapter's `process` and its guard started."""
    for _ in range(2):
        process = int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])
    return process


def main() -> None:
    """The options of `sglang.launch_server` that the adapter may give."""
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "port", "tp-size", "dtype", "device", "context-length"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--weight-version", default="default")
    for name in ("skip-tokenizer-init", "incremental-streaming-output", "enable-memory-saver"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    server = ScriptedServer(
        Path(chosen.model_path), version=chosen.weight_version, step_s=chosen.step_s
    )
    server.is_incremental = chosen.incremental_streaming_output

    async def run() -> None:
        await server.listen(int(chosen.port))
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
