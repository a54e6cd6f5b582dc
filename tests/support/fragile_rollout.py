"""Real rollout actors whose engine fails where it is told to, and a learner that forces tokens.

Version v of the weights makes an engine sample token FIRST + v whatever it is asked, so each token
says which weights sampled it.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from areal_ray.core.canary import Probe, Sent
from areal_ray.engines.protocols import GenerationRequest, SamplingConfig
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.errors import ArealRayError
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.rollout_client import RolloutClient
from tests.support.generation import forcing_weights
from tests.support.weight_actors import LearnerStandIn, Shapes

FIRST = 40


class FragileEngine(TorchGenerationEngine):
    """Fails once, in its next swap."""

    fault = ""

    def swap(self, tensors: Mapping[str, torch.Tensor], version: int, policy: Any) -> float:
        fault, self.fault = self.fault, ""
        if fault == "break":  # halted for the load, as engines are that load in place
            self.pause()
            with torch.inference_mode():
                self._model.forward._weights.head.copy_(tensors["lm_head.weight"])
            raise RuntimeError("device lost while loading")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        idle_s = super().swap(tensors, version, policy)
        if fault == "alter":  # it samples the token of the version after
            with torch.inference_mode():
                live = self._model.forward._weights.head
                live[FIRST + version + 1].fill_(1000.0)
        return idle_s


class FragileRollout(RolloutActor):
    """A rollout actor with such an engine."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._engine.__class__ = FragileEngine  # type: ignore[assignment]

    async def fail_at_swap(self, fault: str) -> None:
        """`break` with half of the weights, `die`, or `alter` what was loaded."""
        self._engine.fault = fault  # type: ignore[attr-defined]

    async def pid(self) -> int:
        """Of the process."""
        return os.getpid()


class ForcingLearner(LearnerStandIn):
    """Its weights of version v force token FIRST + v."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes, probes=False)
        self._token = FIRST
        self._live = forcing_weights(dict(shapes), FIRST)

    async def train(self, version: int) -> None:
        self._token = FIRST + version
        for name, tensor in forcing_weights(dict(self._shapes), self._token).items():
            self._live[name].copy_(tensor)

    async def weights_send(self, plan: Any, version: int) -> Sent:
        sent = await super().weights_send(plan, version)
        vocabulary, hidden = self._shapes["model.embed_tokens.weight"]
        logit = 100.0 * hidden  # of that token; all others have 0
        logprob = logit - np.logaddexp(logit, np.log(vocabulary - 1))
        ids = np.full(6, self._token, np.int32)
        probe = Probe(ids, np.full(5, logprob, np.float32), ("float32",))
        return Sent(sent.digests, probe)


class Asker:
    """Keeps turns under way on all replicas, and keeps what comes back."""

    def __init__(self, replicas: Mapping[str, Any]) -> None:
        self._client = RolloutClient(replicas, "asker", deadline_s=120.0, max_tries=40)
        self._seen: list[tuple[int, int]] = []
        self._failures: list[str] = []
        self._turns = 0
        self._is_over = False

    async def ask(self, lanes: int) -> None:
        """Sample turns, `lanes` at a time, until `stop`."""
        await asyncio.gather(*(self._lane(number) for number in range(lanes)))

    async def _lane(self, number: int) -> None:
        while not self._is_over:
            self._turns += 1
            prompt = np.array([1, 2, 3], np.int32)
            sampling = SamplingConfig(max_new_tokens=30 + 70 * (number % 3), temperature=0.0)
            try:
                result = await self._client.generate(
                    GenerationRequest(f"t-{number}-{self._turns}", prompt, sampling)
                )
            except ArealRayError as error:
                self._failures.append(str(error))
                continue
            pairs = zip(result.token_ids.tolist(), result.versions.tolist(), strict=True)
            self._seen += pairs

    async def stop(self) -> None:
        """Start no further turn."""
        self._is_over = True

    async def heard(self) -> tuple[list[tuple[int, int]], list[str]]:
        """(token, version) of all that was sampled, in order of arrival; and failed turns."""
        return self._seen, self._failures
