"""Forward passes of a Hugging Face causal model over packed rows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_ray.algorithms.logprobs import TokenLogprobs, logits_logprobs, token_logprobs
from areal_ray.algorithms.packing import (
    MicroBatch,
    TrainSequence,
    build_rows,
    join_rows,
    pack_rows,
)
from areal_ray.engines.memory_report import ActivationMeter
from areal_ray.engines.model_loading import uses_flash
from areal_ray.engines.row_attention import (
    attention_mask,
    joined_inputs,
    reads_joined_rows,
    use_row_attention,
)
from areal_ray.engines.sequence_parallel import SequenceRanks, Slice
from areal_ray.engines.sharding import PlacedModel, Replicated, Sharding
from areal_ray.engines.tensor_styles import SEQUENCE_KEY, attention_window
from areal_ray.engines.train_config import OptimizerConfig, TrainEngineConfig
from areal_ray.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a forward pass has to know of a model; found out by trying."""

    has_plain_head: bool
    """Logits are the head of the last hidden state, with nothing before or after. Some families
    scale or cap them (Gemma 2, Cohere, Granite); those take the whole logits."""
    reads_shared_rows: bool
    """It reads positions and masks as shared rows need it. Linear attention and state-space
    layers do not; such models get plain rows."""
    reads_joined_rows: bool
    """It reads rows end to end, by attention of ours; else they are padded."""

    @classmethod
    def of(cls, model: Any, config: TrainEngineConfig) -> "ModelTraits":
        """Of a model that has weights; nothing is true of one without."""
        if model.device.type == "meta":
            return cls(False, False, False)
        if uses_flash(config):
            with torch.autocast("cuda", torch.bfloat16):
                return cls(_head_is_all(model), False, False)
        joins = config.attention == "auto" and reads_joined_rows(model)
        return cls(_head_is_all(model), joins or _rows_match(model), joins)


def placed_rows(
    model: Any,
    config: TrainEngineConfig,
    sharding: Sharding,
    optimizer: OptimizerConfig | None = None,
    *,
    value_head: nn.Module | None = None,
) -> "RowForward":
    """Forward passes of a model that was just loaded to `sharding.loads_to`. Collective.

    Args:
        model: Of Hugging Face.
        config: Type, device, tokens of a pass.
        sharding: Places it over the ranks.
        optimizer: None = it never changes.
        value_head: Placed with the body alone, in place of the model's own.

    Raises:
        EngineError: Ranks are to share its passes, and its attention cannot be told.
    """
    traits = ModelTraits(*sharding.agreed(astuple(ModelTraits.of(model, config))))
    if sharding.sequence is not None and not traits.reads_joined_rows:
        raise EngineError(
            f"{SEQUENCE_KEY}: {type(model).__name__} does not take its attention from "
            "Transformers' interface; must be 1 with it."
        )
    module: nn.Module = model
    if value_head is not None:
        module = nn.ModuleDict({"body": model.base_model, "head": value_head})
    return RowForward(model, config, sharding.place(module, optimizer), traits, sharding.sequence)


class RowForward:
    """Log-probs of trained tokens, with the LM head on the positions that need it alone."""

    def __init__(
        self,
        model: Any,
        config: TrainEngineConfig,
        placed: PlacedModel | None = None,
        traits: ModelTraits | None = None,
        sequence: SequenceRanks | None = None,
    ) -> None:
        """See `placed_rows`; alone, the model is whole and on this rank only."""
        self._sequence = sequence
        traits = traits or ModelTraits.of(model, config)
        self.placed: PlacedModel = placed or Replicated().place(model)
        self._model = model
        self._config = config
        self.device = torch.device(config.device)
        """Where it computes."""
        self.meter = ActivationMeter(model, self.device)
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        self._has_plain_head = traits.has_plain_head
        self._uses_flash = uses_flash(config)
        self._joins = traits.reads_joined_rows
        if self._joins:
            use_row_attention(model)
        text = model.config.get_text_config()
        self._window = attention_window(text)
        self._can_share = config.share_prefixes and traits.reads_shared_rows
        # Attention takes 4 H operations a pair and layer, the rest about 24 H^2 a token.
        self._pair_cost = 1.0 / (6.0 * text.hidden_size)

    def new_column(self, num_tokens: int) -> Tensor:
        """[N] zeros of the type that log-probs have, where the model computes."""
        dtype = torch.float64 if self._config.dtype == "float64" else torch.float32
        return torch.zeros(num_tokens, dtype=dtype, device=self.device)

    def shares_prefixes(self, longest_tokens: int) -> bool:
        """Whether sequences up to this length may share rows: not beyond a sliding window."""
        return self._can_share and self._sees_all(longest_tokens)

    def joins_rows(self, longest_tokens: int) -> bool:
        """Whether sequences up to this length are read end to end: not beyond a window, but by
        flash-attn, which knows it."""
        return self._uses_flash or (self._joins and self._sees_all(longest_tokens))

    def _sees_all(self, longest_tokens: int) -> bool:
        return self._window is None or longest_tokens <= self._window

    def micro_batches(
        self, sequences: Sequence[TrainSequence], *, beside: "RowForward | None" = None
    ) -> list[MicroBatch]:
        """Cut sequences into forward passes of at most `max_tokens_per_mb`.

        Those that only keep other ranks company come last and have no target. Collective where
        passes are. `beside`: of another model, which is to read them too.
        """
        budget = self._config.max_tokens_per_mb
        longest = max((len(s.token_ids) for s in sequences), default=0)
        rows = build_rows(
            sequences,
            max_tokens=budget,
            share_prefixes=self.shares_prefixes(longest),
            pair_cost=self._pair_cost,
        )
        if all(model.joins_rows(longest) for model in (self, beside or self)):
            found = join_rows(rows, max_tokens=budget, pair_cost=self._pair_cost)
        elif self._sequence is not None:
            raise EngineError(
                f"{SEQUENCE_KEY}: a sequence of {longest} tokens is longer than the model's "
                "attention window; must be 1 with such sequences."
            )
        else:
            found = pack_rows(rows, max_tokens=budget)
        num_passes = self.placed.num_passes(len(found))
        return [*found, *(MicroBatch.empty() for _ in range(num_passes - len(found)))]

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add to the gradient; `is_last` before the next update."""
        if self._sequence is not None:  # each of its ranks has the loss of the whole pass
            loss = loss / self._sequence.width
        self.placed.backward(loss, is_last=is_last)

    @property
    def dtype(self) -> str:
        """Type it computes in, as torch names it."""
        return self._config.dtype

    @property
    def text_config(self) -> Any:
        """The model's own configuration, of its language part."""
        return self._model.config.get_text_config()

    def __call__(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """Log-probs of the batch's targets, in its order."""
        with self._metered(batch):
            found = self.placed.run(self._scored, batch, temperature, entropy_gradient)
        return TokenLogprobs(*found)

    def states(self, batch: MicroBatch) -> Tensor:
        """[N, H] as `hidden`, or [N, V] logits where the head is not all there is to them."""
        with self._metered(batch):
            return self.placed.run(self._joined, self._states, batch)

    def logits_of(self, states: Tensor) -> Tensor:
        """[N, V] of some rows of `states`."""
        if not self._has_plain_head:
            return states
        with self._autocast():
            logits: Tensor = self._head(states)
        return logits

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[N, H] final hidden state at the token that predicts each target."""
        with self._metered(batch):
            return self.placed.run(self._joined, self._hidden, batch)

    def _metered(self, batch: MicroBatch) -> AbstractContextManager[None]:
        width = 1 if self._sequence is None else self._sequence.width
        return self.meter.over(batch.token_ids.size // width)

    def _slice(self, batch: MicroBatch) -> Slice:
        return Slice.all_of(batch) if self._sequence is None else self._sequence.slice_of(batch)

    def _joined(self, compute: Callable[[MicroBatch, Slice], Tensor], batch: MicroBatch) -> Tensor:
        own = self._slice(batch)
        found = compute(batch, own)
        if self._sequence is None:
            return found
        return self._sequence.joined(found, own, len(batch.targets))

    def _scored(
        self, batch: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = self._slice(batch)
        targets = torch.from_numpy(own.targets).to(self.device)
        states = self._states(batch, own)
        with self._autocast():
            if not self._has_plain_head:
                found = logits_logprobs(
                    states, targets, temperature, entropy_gradient=entropy_gradient
                )
            else:
                found = token_logprobs(
                    states,
                    self._head.weight,
                    getattr(self._head, "bias", None),
                    targets,
                    temperature=temperature,
                    entropy_gradient=entropy_gradient,
                )
        if self._sequence is None:
            return found.logprobs, found.entropy, found.is_argmax
        columns = (found.logprobs, found.entropy, found.is_argmax.to(found.logprobs))
        whole = self._sequence.joined(torch.stack(columns, 1), own, len(batch.targets))
        logprobs, entropy, is_argmax = whole.unbind(1)
        return logprobs, entropy if entropy_gradient else entropy.detach(), is_argmax > 0.5

    def _states(self, batch: MicroBatch, own: Slice) -> Tensor:
        if self._has_plain_head:
            return self._hidden(batch, own)
        with self._autocast():
            logits: Tensor = self._model(**self._inputs(batch, own), use_cache=False).logits
        return self._chosen(logits, own)

    def _hidden(self, batch: MicroBatch, own: Slice) -> Tensor:
        with self._autocast():
            states = self._body(**self._inputs(batch, own), use_cache=False).last_hidden_state
        return self._chosen(states, own)

    def _chosen(self, states: Tensor, own: Slice) -> Tensor:
        """[n, ...] rows of [B, L, ...] that predict a target."""
        at = torch.from_numpy(own.sources).to(self.device)
        return states.flatten(0, 1).index_select(0, at)

    def _autocast(self) -> Any:
        if self._config.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _inputs(self, batch: MicroBatch, own: Slice) -> dict[str, Any]:
        device, dtype = self.device, _DTYPES[self._config.dtype]
        if self._joins and batch.joined is not None:
            joined = joined_inputs(batch, dtype, device)
            if self._sequence is not None:
                joined["input_ids"] = torch.from_numpy(own.token_ids).to(device)
                joined["position_ids"] = torch.from_numpy(own.position_ids).to(device)
                joined["sequence"] = self._sequence.pass_over(batch)
            return joined
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.token_ids).to(device)}
        if batch.segment_ids is not None:
            inputs["position_ids"] = torch.from_numpy(batch.position_ids).to(device)
            inputs["attention_mask"] = attention_mask(batch.segment_ids, dtype, device)
        if batch.joined is not None:  # what flash-attn's kernels read
            inputs["position_ids"] = torch.from_numpy(batch.position_ids).to(device)
            starts = torch.from_numpy(batch.joined.starts).to(device)
            longest = int(np.diff(batch.joined.starts).max())
            inputs |= {f"cu_seq_lens_{side}": starts for side in "qk"}
            inputs |= {f"max_length_{side}": longest for side in "qk"}
        return inputs


@torch.no_grad()
def _head_is_all(model: Any) -> bool:
    head = model.get_output_embeddings()
    if head is None or not isinstance(head, nn.Linear):
        return False
    tokens = torch.arange(4, device=model.device)[None]
    logits = model(input_ids=tokens, use_cache=False).logits
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return bool(torch.allclose(head(hidden), logits, rtol=1e-4, atol=1e-4))


@torch.no_grad()
def _rows_match(model: Any) -> bool:
    device, body = model.device, model.base_model
    plain = body(input_ids=torch.tensor([[1, 2, 5, 6]], device=device), use_cache=False)
    allowed = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    allowed[4:, 2:4] = False
    mask = torch.zeros(6, 6, dtype=model.dtype, device=device)
    mask.masked_fill_(~allowed, torch.finfo(model.dtype).min)
    shared = body(
        input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]], device=device),
        position_ids=torch.tensor([[0, 1, 2, 3, 2, 3]], device=device),
        attention_mask=mask[None, None],
        use_cache=False,
    )
    own = shared.last_hidden_state[:, 4:]
    return bool(torch.allclose(own, plain.last_hidden_state[:, 2:], rtol=1e-3, atol=1e-3))
