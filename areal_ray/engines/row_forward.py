"""Forward passes of a Hugging Face causal model over packed rows."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
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
from areal_ray.engines.row_attention import (
    attention_mask,
    joined_inputs,
    reads_joined_rows,
    use_row_attention,
)
from areal_ray.engines.sharding import PlacedModel, Replicated, Sharding
from areal_ray.engines.train_config import OptimizerConfig, TrainEngineConfig
from areal_ray.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_causal_model(
    path: Path | str, config: TrainEngineConfig, *, key: str = "model.path", device: str = ""
) -> Any:
    """A Hugging Face causal language model, ready to train; `key` of the recipe names it.

    `device` other than the config's: where it is to lie; meta = without weights.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from transformers import AutoModelForCausalLM

    return load_model(AutoModelForCausalLM, path, config, key=key, device=device)


def load_model(
    kind: Any,
    path: Path | str,
    config: TrainEngineConfig,
    *,
    key: str,
    device: str = "",
    **fields: Any,
) -> Any:
    """The same for any of Transformers' Auto classes.

    Args:
        kind: The Auto class.
        path: Folder or hub name.
        config: Type, device and checkpointing.
        key: Of the recipe, that names the path.
        device: Where it is to lie; empty = where the config says, meta = without weights.
        fields: Of the model's configuration.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each rank would tear the run's own display
    weights = torch.float64 if config.dtype == "float64" else torch.float32
    attention = "flash_attention_2" if uses_flash(config) else "sdpa"
    how = {"dtype": weights, "attn_implementation": attention}
    try:
        if device == "meta":
            model: Any = _without_weights(kind, path, how, fields)
        else:
            model = kind.from_pretrained(path, **how, **fields)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        told = " ".join(str(error).split())
        raise EngineError(
            f"{key}: cannot load the model at {path}: {told}; it must be a Hugging Face causal "
            f"language model. Check {key}."
        ) from error
    for module in model.modules():  # the policy that is trained must be the one that sampled
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.eval()
    if config.gradient_checkpointing:
        model.config.attention_dropout = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model.to(device or config.device)


def uses_flash(config: TrainEngineConfig) -> bool:
    """Whether passes go through flash-attn's kernels for sequences of various lengths.

    Raises:
        EngineError: It was asked for and is not there.
    """
    if config.attention == "sdpa" or (config.device, config.dtype) != ("cuda", "bfloat16"):
        return False
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        return True
    if config.attention == "flash":
        raise EngineError(
            "learner.engine.attention: is flash, and flash-attn is not there or not for this GPU; "
            "must be sdpa or auto then. Install areal-ray[flash-attn], or change it."
        )
    return False


def _without_weights(kind: Any, path: Path | str, how: Any, fields: Any) -> Any:
    from transformers import AutoConfig

    made_of = AutoConfig.from_pretrained(path, **fields)
    with torch.device("meta"):
        return kind.from_config(made_of, **how)


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
    """
    traits = ModelTraits(*sharding.agreed(astuple(ModelTraits.of(model, config))))
    module: nn.Module = model
    if value_head is not None:
        module = nn.ModuleDict({"body": model.base_model, "head": value_head})
    return RowForward(model, config, sharding.place(module, optimizer), traits)


class RowForward:
    """Log-probs of trained tokens, with the LM head on the positions that need it alone."""

    def __init__(
        self,
        model: Any,
        config: TrainEngineConfig,
        placed: PlacedModel | None = None,
        traits: ModelTraits | None = None,
    ) -> None:
        """See `placed_rows`; alone, the model is whole and on this rank only."""
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
        limits = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
        self._window = min((limit for limit in limits if limit), default=None)
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
        else:
            found = pack_rows(rows, max_tokens=budget)
        num_passes = self.placed.num_passes(len(found))
        return [*found, *(MicroBatch.empty() for _ in range(num_passes - len(found)))]

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add to the gradient; `is_last` before the next update."""
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
        with self.meter.over(batch.token_ids.size):
            found = self.placed.run(self._scored, batch, temperature, entropy_gradient)
        return TokenLogprobs(*found)

    def states(self, batch: MicroBatch) -> Tensor:
        """[N, H] as `hidden`, or [N, V] logits where the head is not all there is to them."""
        with self.meter.over(batch.token_ids.size):
            return self.placed.run(self._states, batch)

    def logits_of(self, states: Tensor) -> Tensor:
        """[N, V] of some rows of `states`."""
        if not self._has_plain_head:
            return states
        with self._autocast():
            logits: Tensor = self._head(states)
        return logits

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[N, H] final hidden state at the token that predicts each target."""
        with self.meter.over(batch.token_ids.size):
            return self.placed.run(self._hidden, batch)

    def _scored(
        self, batch: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets = torch.from_numpy(batch.targets).to(self.device)
        states = self._states(batch)
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
        return found.logprobs, found.entropy, found.is_argmax

    def _states(self, batch: MicroBatch) -> Tensor:
        if self._has_plain_head:
            return self._hidden(batch)
        with self._autocast():
            logits: Tensor = self._model(**self._inputs(batch), use_cache=False).logits
        return self._chosen(logits, batch)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        with self._autocast():
            states = self._body(**self._inputs(batch), use_cache=False).last_hidden_state
        return self._chosen(states, batch)

    def _chosen(self, states: Tensor, batch: MicroBatch) -> Tensor:
        """[N, ...] rows of [B, L, ...] that predict a target."""
        at = torch.from_numpy(batch.sources).to(self.device)
        return states.flatten(0, 1).index_select(0, at)

    def _autocast(self) -> Any:
        if self._config.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        device, dtype = self.device, _DTYPES[self._config.dtype]
        if self._joins and batch.joined is not None:
            return joined_inputs(batch, dtype, device)
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
