"""What runs inside vLLM's own processes: our weight-transfer engine, and what log-probs are told.

vLLM imports this module by its name, before it makes its worker. Nothing else should.
"""

import ctypes
import logging
import multiprocessing
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.sample.sampler import Sampler

from areal_ray.engines.vllm_arguments import TRANSFER_BACKEND
from areal_ray.engines.vllm_weights import WeightNote, open_weights

_GREEDY_BELOW = 1e-5
_PR_SET_PDEATHSIG = 1


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """One message of an update: where the weights lie, or that they are to be loaded."""

    note: dict[str, Any] = field(default_factory=dict)
    """Fields of a `WeightNote`; empty = load what the last note tells of."""


class StagedTransferEngine(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Loads what the rollout actor's receiver has staged.

    An update has two messages: the first opens the staged tensors while requests run, the second,
    sent once they stand still, loads them. A note alone never touches the model.
    """

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    supports_draft_weight_update = False

    _staged: dict[str, torch.Tensor] | None = None

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """Nothing to meet: whoever sends sits on the same node."""

    def start_weight_update(self) -> None:
        """Forget an earlier update that was not finished."""
        self._staged = None

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Open the staged tensors, or load them."""
        if update_info.note:
            self._staged = open_weights(WeightNote(**update_info.note), self.device)
            return
        if self._staged is None:
            raise RuntimeError("weights are to be loaded, but none were staged")
        # vLLM's own reload: what it packs for its kernels is packed anew, in place.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(self._staged.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied_heads(self.model)

    def finish_weight_update(self) -> None:
        """Let go of the staged memory."""
        self._staged = None

    def shutdown(self) -> None:
        """Let go of the staged memory."""
        self._staged = None


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Have heads that share the embedding's weight compute with what it holds now.

    No tensor of the update is theirs, so vLLM's reload passes them by; but on the CPU each computes
    with a packed copy of its own, made at the start. On a GPU this does nothing.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embedded = {id(one.weight) for one in layers if not isinstance(one, ParallelLMHead)}
    for layer in layers:
        is_tied = isinstance(layer, ParallelLMHead) and id(layer.weight) in embedded
        if is_tied and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)


class PolicySampler(Sampler):
    """vLLM's sampler, telling the log-prob that the learner will compare against.

    That is log_softmax(logits / temperature) of the sampled token over the whole vocabulary:
    vLLM's raw log-probs know no temperature, its processed ones are those after top-k, top-p and
    penalties. Greedy rows are told at temperature 1.
    """

    policy_logits: torch.Tensor | None = None
    """[n, vocabulary] of a step in which grammars changed the logits: those before."""
    _temperature: torch.Tensor | None = None

    def forward(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample a step; the temperatures [n] are known to `compute_logprobs` meanwhile."""
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._temperature = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] log-probs; outside of a step (of prompt tokens) at temperature 1."""
        if self._temperature is None:
            return Sampler.compute_logprobs(logits)
        if self.policy_logits is not None:
            logits = self.policy_logits
        temperature = self._temperature[:, None]
        scale = torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)
        return Sampler.compute_logprobs(logits.float() / scale)


class WorkerExtension:
    """Methods that vLLM's worker gets beside its own; called by `collective_rpc`."""

    model_runner: Any

    def areal_ray_prepare(self) -> str:
        """Have the sampler tell the policy's log-probs; the name of the sampler's class before."""
        sampler = self.model_runner.sampler
        before = type(sampler).__name__
        if isinstance(sampler, Sampler):
            sampler.__class__ = PolicySampler
            sampler.logprobs_mode = "raw_logprobs"
            self.model_runner.sample_tokens = _keeping_the_policy(self.model_runner)
        else:
            kept = _keep_logits(self.model_runner.structured_outputs_worker)
            sampler.sample = _telling_the_policy(sampler, kept)
            sampler.logprobs_mode = "processed_logprobs"
        return before


def _keeping_the_policy(runner: Any) -> Any:
    """`sample_tokens` of vLLM's first model runner, whose sampler gets masked logits alone."""
    inner = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        if grammar_output is not None and state is not None and state.logits is not None:
            runner.sampler.policy_logits = state.logits.clone()
        try:
            return inner(grammar_output)
        finally:
            runner.sampler.policy_logits = None

    return sample_tokens


def _keep_logits(masks: Any) -> list[torch.Tensor]:
    """What the second model runner masks in this step, as it was before; empty where it does not.

    `masks` is who applies grammars there; None where none can be.
    """
    kept: list[torch.Tensor] = []
    if masks is not None:
        inner = masks.apply_grammar_bitmask

        def apply_grammar_bitmask(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            kept.append(logits.clone())
            inner(logits, *args, **kwargs)

        masks.apply_grammar_bitmask = apply_grammar_bitmask
    return kept


def _telling_the_policy(sampler: Any, kept: list[torch.Tensor]) -> Any:
    """`sample` of the sampler of vLLM's second model runner (GPU), with the policy's logits.

    It is asked for processed log-probs and takes them from the logits that `sample` hands back:
    here those before grammars (`kept`), penalties and filters, at the request's temperature.
    """
    inner = sampler.sample

    def sample(
        logits: torch.Tensor, mapping: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sampled, _ = inner(logits, mapping, *args, **kwargs)
        policy = kept.pop() if kept else logits
        policy = policy.to(torch.float32, copy=True)
        # The third argument has the rows as numpy; vLLM's kernel leaves greedy rows as they are.
        sampler.sampling_states.apply_temperature(policy, mapping, args[1])
        return sampled, policy

    return sample


def _end_with_parent() -> None:
    """Have the kernel end this process with the actor that started it, however that ends.

    An engine left behind would keep its GPU.
    """
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_end_with_parent()
# It says at every update that position tables were not in it, which no checkpoint has.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, StagedTransferEngine)
