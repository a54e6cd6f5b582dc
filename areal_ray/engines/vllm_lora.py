"""Adapters in vLLM: one LoRA that every turn asks for, replaced in place at each version.

In place, and not a LoRA for each version, so that a version means the same as with all weights:
from the swap on every running turn samples under it, and vLLM's own per-token spans say so.
vLLM loads an adapter from files; they lie in a folder of the engine's own.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_ray.engines.lora_config import LoraSetup, engine_problems
from areal_ray.engines.lora_weights import (
    LinearLayer,
    adapted_layers,
    adapter_shapes,
    read_adapters,
    write_adapter_weights,
)
from areal_ray.engines.model_files import check_tensors
from areal_ray.errors import EngineError

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM reserves memory for."""
_POLICY, _ID = "policy", 1


class VllmAdapters:
    """The adapters of one engine."""

    def __init__(self, layers: Mapping[str, LinearLayer], setup: LoraSetup) -> None:
        """Write those that it begins with.

        Args:
            layers: Linear layers of the model.
            setup: Which of them, and the adapters to begin with.

        Raises:
            RecipeError: A target is no linear layer of the model.
            DataError: The adapters to begin with cannot be read.
            EngineError: They are not of this model, or their rank is more than vLLM takes.
        """
        self._config = setup.config
        self._layers = adapted_layers(layers, setup.config)
        self.shapes = adapter_shapes(self._layers, setup.config.rank)
        for problem in engine_problems(setup.config, "vllm"):
            raise EngineError(problem)
        self._files = tempfile.TemporaryDirectory(prefix="areal-ray-adapter-")
        self._folder = self._written(self._first(setup), "first")

    @property
    def arguments(self) -> dict[str, Any]:
        """Of vLLM's engine."""
        reserved = next(rank for rank in _RANKS if rank >= self._config.rank)
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": reserved,
            # Else vLLM wraps the head as well, and on the CPU fails to tell a prompt's log-probs.
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self._layers}),
        }

    @property
    def request(self) -> Any:
        """What every turn asks for."""
        return self._request(load_inplace=False)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make these checked tensors what `load` loads."""
        # A folder for each: vLLM may have the files of the live version mapped.
        before, self._folder = self._folder, self._written(tensors, str(version))
        if before != self._folder:
            shutil.rmtree(before, ignore_errors=True)

    async def load(self, llm: Any, version: int) -> None:
        """Replace the live adapters by what was written, and label tokens so; while it stands."""
        await llm.add_lora(self._request(load_inplace=True))
        await llm.update_weight_version(str(version))

    def _written(self, tensors: Mapping[str, Tensor], name: str) -> Path:
        folder = Path(self._files.name) / name
        folder.mkdir(exist_ok=True)
        said = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._config.rank,
            "lora_alpha": self._config.alpha,
            "use_rslora": self._config.rslora,
            "target_modules": self._config.endings(self._layers),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
        write_adapter_weights(folder, tensors)
        return folder

    def close(self) -> None:
        """Remove the files."""
        self._files.cleanup()

    def _request(self, *, load_inplace: bool) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(_POLICY, _ID, str(self._folder), load_inplace=load_inplace)

    def _first(self, setup: LoraSetup) -> Mapping[str, Tensor]:
        if not setup.folder:
            return {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        tensors = read_adapters(setup.folder)
        check_tensors(self.shapes, tensors)
        return tensors
