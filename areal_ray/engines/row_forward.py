"""Forward passes of a Hugging Face causal model over packed rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_ray.algorithms.logprobs import TokenLogprobs, logits_logprobs, token_logprobs
from areal_ray.algorithms.packing import (
    MicroBatch,
    TrainSequence,
    attention_allowed,
    build_rows,
    pack_rows,
)
from areal_ray.engines.train_config import TorchTrainConfig
from areal_ray.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_causal_model(
    path: Path | str, config: TorchTrainConfig, *, key: str = "model.path"
) -> Any:
    """A Hugging Face causal language model, ready to train; `key` of the recipe names it.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from transformers import AutoModelForCausalLM

    return load_model(AutoModelForCausalLM, path, config, key=key)


def load_model(
    kind: Any, path: Path | str, config: TorchTrainConfig, *, key: str, **fields: Any
) -> Any:
    """The same for any of Transformers' Auto classes.

    Args:
        kind: The Auto class.
        path: Folder or hub name.
        config: Type, device and checkpointing.
        key: Of the recipe, that names the path.
        fields: Of the model's configuration.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each rank would tear the run's own display
    weights = torch.float64 if config.dtype == "float64" else torch.float32
    try:
        model: Any = kind.from_pretrained(path, dtype=weights, attn_implementation="sdpa", **fields)
    except (OSError, ValueError, KeyError, ImportError) as error:
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
    return model.to(config.device)


class RowForward:
    """Log-probs of trained tokens, with the LM head on the positions that need it alone."""

    def __init__(self, model: Any, config: TorchTrainConfig) -> None:
        self._model = model
        self._config = config
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        self._has_plain_head = self._head_is_all()
        text = model.config.get_text_config()
        self._window = text.sliding_window if getattr(text, "sliding_window", None) else None
        self._can_share = config.share_prefixes and self._rows_match()
        # Attention takes 4 H operations a pair and layer, the rest about 24 H^2 a token.
        self._pair_cost = 1.0 / (6.0 * text.hidden_size)

    def new_column(self, num_tokens: int) -> Tensor:
        """[N] zeros of the type that log-probs have, where the model computes."""
        dtype = torch.float64 if self._config.dtype == "float64" else torch.float32
        return torch.zeros(num_tokens, dtype=dtype, device=self._model.device)

    def shares_prefixes(self, longest_tokens: int) -> bool:
        """Whether sequences up to this length may share rows: not beyond a sliding window."""
        return self._can_share and (self._window is None or longest_tokens <= self._window)

    def micro_batches(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """Cut sequences into forward passes of at most `max_tokens_per_mb`."""
        budget = self._config.max_tokens_per_mb
        longest = max((len(s.token_ids) for s in sequences), default=0)
        rows = build_rows(
            sequences,
            max_tokens=budget,
            share_prefixes=self.shares_prefixes(longest),
            pair_cost=self._pair_cost,
        )
        return pack_rows(rows, max_tokens=budget)

    @property
    def width(self) -> int:
        """H, the size of a hidden state."""
        return int(self._model.config.get_text_config().hidden_size)

    def __call__(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """Log-probs of the batch's targets, in its order."""
        device = self._model.device
        targets = torch.from_numpy(batch.targets).to(device)
        with torch.autocast(device.type, torch.bfloat16, self._config.dtype == "bfloat16"):
            if not self._has_plain_head:
                return logits_logprobs(
                    self.states(batch), targets, temperature, entropy_gradient=entropy_gradient
                )
            bias = getattr(self._head, "bias", None)
            return token_logprobs(
                self.hidden(batch),
                self._head.weight,
                bias,
                targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
            )

    def states(self, batch: MicroBatch) -> Tensor:
        """[N, H] as `hidden`, or [N, V] logits where the head is not all there is to them."""
        if self._has_plain_head:
            return self.hidden(batch)
        device = self._model.device
        with torch.autocast(device.type, torch.bfloat16, self._config.dtype == "bfloat16"):
            logits: Tensor = self._model(**self._inputs(batch), use_cache=False).logits
        return logits.flatten(0, 1)[torch.from_numpy(batch.sources).to(device)]

    def logits_of(self, states: Tensor) -> Tensor:
        """[N, V] of some rows of `states`."""
        if not self._has_plain_head:
            return states
        with torch.autocast(states.device.type, torch.bfloat16, self._config.dtype == "bfloat16"):
            logits: Tensor = self._head(states)
        return logits

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[N, H] final hidden state at the token that predicts each target."""
        device = self._model.device
        with torch.autocast(device.type, torch.bfloat16, self._config.dtype == "bfloat16"):
            states = self._body(**self._inputs(batch), use_cache=False).last_hidden_state
        at = torch.from_numpy(batch.sources).to(device)
        chosen: Tensor = states.flatten(0, 1).index_select(0, at)
        return chosen

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        device = self._model.device
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.token_ids).to(device)}
        if batch.segment_ids is not None:
            inputs["position_ids"] = torch.from_numpy(batch.position_ids).to(device)
            inputs["attention_mask"] = self._mask(batch)
        return inputs

    def _mask(self, batch: MicroBatch) -> Tensor:
        """[B, 1, L, L] 0 where attention is allowed and the lowest number elsewhere."""
        assert batch.segment_ids is not None
        allowed = torch.from_numpy(attention_allowed(batch.segment_ids)).to(self._model.device)
        dtype = _DTYPES[self._config.dtype]
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]

    @torch.no_grad()
    def _head_is_all(self) -> bool:
        """Whether logits are the head of the last hidden state, with nothing before or after.

        Some families scale or cap them (Gemma 2, Cohere, Granite); those take the whole logits.
        """
        if self._head is None or not isinstance(self._head, nn.Linear):
            return False
        tokens = torch.arange(4, device=self._model.device)[None]
        logits = self._model(input_ids=tokens, use_cache=False).logits
        hidden = self._body(input_ids=tokens, use_cache=False).last_hidden_state
        return bool(torch.allclose(self._head(hidden), logits, rtol=1e-4, atol=1e-4))

    @torch.no_grad()
    def _rows_match(self) -> bool:
        """Whether this model reads positions and masks as shared rows need it.

        Linear attention and state-space layers do not; such models get plain rows.
        """
        device = self._model.device
        plain = self._body(input_ids=torch.tensor([[1, 2, 5, 6]], device=device), use_cache=False)
        allowed = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
        allowed[4:, 2:4] = False
        mask = torch.zeros(6, 6, dtype=self._model.dtype, device=device)
        mask.masked_fill_(~allowed, torch.finfo(self._model.dtype).min)
        shared = self._body(
            input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]], device=device),
            position_ids=torch.tensor([[0, 1, 2, 3, 2, 3]], device=device),
            attention_mask=mask[None, None],
            use_cache=False,
        )
        own = shared.last_hidden_state[:, 4:]
        return bool(torch.allclose(own, plain.last_hidden_state[:, 2:], rtol=1e-3, atol=1e-3))
