"""Adapters: LoRA on a model that is trained, by peft; the model's own weights stand still.

Held by the train engine, alike on every rank. The tensors of a sharded model are given by name, as
whoever shards it gathers them; nothing here asks other ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from areal_ray.engines.lora_config import ADAPTER_FOLDER, LoraSetup
from areal_ray.engines.lora_weights import (
    MergedWeights,
    adapted_layers,
    linear_layers,
    read_adapters,
    write_adapter_weights,
)
from areal_ray.errors import DataError, EngineError

T = TypeVar("T")

_NAME = "default"
"""Of the one adapter, inside peft's layers."""
_INSIDE = f".{_NAME}."
_KEPT = ".base_layer."
_HEAD = "score"
"""Of a reward model."""


class Adapters:
    """The adapters of one model, put into it when this is made."""

    def __init__(self, model: Any, setup: LoraSetup) -> None:
        """Give the model's layers adapters, in place; all else in it stops training.

        A reward model's head goes on training whole: it may be new.

        Args:
            model: A Hugging Face model as loaded.
            setup: Which layers, how large, and the seed: the same on every rank.

        Raises:
            RecipeError: A target is no linear layer of the model.
            EngineError: peft is not installed.
        """
        peft = _peft()
        self._config = setup.config
        self._layers = adapted_layers(linear_layers(model), setup.config)
        self._source = str(getattr(model.config, "_name_or_path", ""))
        head = getattr(model, _HEAD, None)
        self._has_head = isinstance(head, nn.Linear)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            made = self._peft_config(list(self._layers))
            peft.inject_adapter_in_model(made, model, adapter_name=_NAME)
        if isinstance(head, nn.Linear):
            head.requires_grad_(True)
        parameters = dict(model.named_parameters())
        self._own_names = self._names(parameters)
        self._shapes = {name: tuple(t.shape) for name, t in self.trained(parameters).items()}
        kind = peft.tuners.lora.LoraLayer
        self._lora_layers = [m for m in model.modules() if isinstance(m, kind)]

    def _peft_config(self, targets: list[str], **fields: Any) -> Any:
        return _peft().LoraConfig(
            r=self._config.rank,
            lora_alpha=self._config.alpha,
            lora_dropout=0.0,
            use_rslora=self._config.rslora,
            bias="none",
            target_modules=targets,
            fan_in_fan_out=all(layer.is_transposed for layer in self._layers.values()),
            **fields,
        )

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Around forward passes of the model as it was without them."""
        # By their scale: peft's own switch also takes the adapters' gradients away.
        scales = [layer.scaling[_NAME] for layer in self._lora_layers]
        for layer in self._lora_layers:
            layer.scaling[_NAME] = 0.0
        try:
            yield
        finally:
            for layer, scale in zip(self._lora_layers, scales, strict=True):
                layer.scaling[_NAME] = scale

    def trained(self, named: Mapping[str, T]) -> dict[str, T]:
        """What trains, by the names it travels under.

        Args:
            named: Parameters of the model by its own names, or what stands for them.
        """
        return {plain: named[name] for plain, name in self._names(named).items()}

    def _names(self, named: Iterable[str]) -> dict[str, str]:
        """Name in files and on the wire -> name in the model, of all that trains."""
        found = {}
        for name in named:
            if _INSIDE in name:
                found[name.replace(_INSIDE, ".")] = name
            elif self._has_head and name.startswith(f"{_HEAD}."):
                found[name] = name
        return found

    def merged(self, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a plain model of the same kind, with the adapters in them.

        Args:
            named: Parameters (and buffers) of the model by its own names.
        """
        plain = {n.replace(_KEPT, "."): named[n] for n in named if _INSIDE not in n}
        return MergedWeights(plain, self._layers, self.trained(named), self._config.scale)

    def write(self, checkpoint: Path, named: Mapping[str, Tensor]) -> None:
        """Write them into a folder of the checkpoint that peft and vLLM load.

        Args:
            checkpoint: Its folder, made where it is missing.
            named: Parameters of the model by its own names.
        """
        folder = checkpoint / ADAPTER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._peft_config(
            self._config.endings(self._layers),
            base_model_name_or_path=self._source,
            task_type="SEQ_CLS" if self._has_head else "CAUSAL_LM",
            modules_to_save=[_HEAD] if self._has_head else None,
            inference_mode=True,
        ).save_pretrained(folder)
        write_adapter_weights(folder, self.trained(named))

    def read(self, checkpoint: Path) -> dict[str, Tensor]:
        """What `write` wrote, by the model's own names.

        Raises:
            DataError: There are none, or they are of other layers or another rank.
        """
        saved = read_adapters(checkpoint)
        found = {name: tuple(t.shape) for name, t in saved.items()}
        wrong = [n for n in found.keys() | self._shapes if found.get(n) != self._shapes.get(n)]
        if wrong:
            name = min(wrong)
            raise DataError(
                f"{checkpoint / ADAPTER_FOLDER}: {name} is {found.get(name, 'missing')}; must be "
                f"{self._shapes.get(name, 'no tensor')} under this recipe's model.lora. Resume "
                "with the model.lora that the run began with."
            )
        return {self._own_names[name]: tensor for name, tensor in saved.items()}


def _peft() -> Any:
    try:
        import peft
        import peft.tuners.lora
    except ImportError as error:
        raise EngineError(
            f"model.lora: the package peft is needed and cannot be imported ({error}). "
            "Install it: pip install 'areal-ray[lora]'"
        ) from error
    return peft
