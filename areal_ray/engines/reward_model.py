"""Reward models: loading one to train it, and one as the reward of a run of kind rl.

A reward model is what AutoModelForSequenceClassification loads with one label: the body of a
causal model and a linear head named `score`. The score stands at the last token.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.task import Task
from areal_ray.core.trajectory import Trajectory
from areal_ray.engines.model_files import model_folder, stop_token_ids
from areal_ray.engines.train_config import TorchTrainConfig, TrainEngineConfig
from areal_ray.errors import DataError, EngineError

if TYPE_CHECKING:
    from torch import nn


def load_score_model(
    path: Path | str, config: TrainEngineConfig, *, key: str = "model.path", device: str = ""
) -> Any:
    """A reward model, ready to train; a new head is 0 where the checkpoint has none.

    `key` of the recipe names it; `device` other than the config's: see `load_model`.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from torch import nn
    from transformers import AutoModelForSequenceClassification

    from areal_ray.engines.model_loading import load_model

    folder = model_folder(path, key)
    kind = AutoModelForSequenceClassification
    model = load_model(kind, folder, config, key=key, device=device, num_labels=1)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise EngineError(
            f"{key}: the model at {path} has no linear head named 'score' as a sequence "
            "classifier; a reward model must. Use a model of the Llama, Qwen, Mistral or Gemma "
            "family."
        )
    if not has_score_head(folder):
        nn.init.zeros_(head.weight)
    ends = stop_token_ids(folder)
    if model.config.pad_token_id is None or model.config.pad_token_id in ends:
        # A classifier reads the score before the padding: no answer may end with that.
        model.config.pad_token_id = next(i for i in range(len(ends) + 1) if i not in ends)
    return model


class RewardModelScore:
    """The reward function `areal_ray.engines.reward_model:score`."""

    def prepare(self, path: str, **how: Any) -> None:
        """Load the model, before any time limit of an episode runs."""
        _scorer(path, how.get("device", "cpu"), how.get("dtype", "float32"))

    def __call__(
        self,
        task: Task,
        trajectory: Trajectory,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> dict[str, Any]:
        """The score of the conversation as the policy saw it: its recorded token ids.

        Args:
            task: Not read.
            trajectory: Ends with the last token that was sampled.
            path: Folder or hub name of the reward model; of the policy's tokenizer.
            device: Where it computes.
            dtype: Of its weights: float32 or bfloat16.

        Raises:
            DataError: A token id that the model does not know.
        """
        model = _scorer(path, device, dtype)
        sampled = np.flatnonzero(trajectory.loss_mask)
        end = int(sampled[-1]) + 1 if len(sampled) else len(trajectory.token_ids)
        ids, known = trajectory.token_ids[:end], int(model.config.get_text_config().vocab_size)
        if int(ids.max()) >= known:
            raise DataError(
                f"reward.args.path: {path} knows token ids below {known}, the episode has "
                f"{int(ids.max())}; it must share the policy's tokenizer"
            )
        return {"reward": score_tokens(model, ids)}


score = RewardModelScore()
"""`reward.score` of a run whose reward is a model."""


def score_tokens(model: Any, ids: NDArray[np.int32]) -> float:
    """Score at the last of [T] token ids."""
    import torch

    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        head: nn.Linear = model.score
        return float(head(hidden[0, -1].to(head.weight.dtype))[0])


@functools.cache
def _scorer(path: str, device: str, dtype: str) -> Any:
    """The model of this process; loaded once."""
    import torch

    torch.set_num_threads(1)
    # The train engine computes in bfloat16 beside float32 weights; scoring needs no such weights.
    config = TorchTrainConfig(dtype="float32", device="cuda" if "cuda" in device else "cpu")
    model = load_score_model(path, config, key="reward.args.path")
    return model.to(torch.bfloat16) if dtype == "bfloat16" else model


def has_score_head(folder: Path) -> bool:
    """Whether a checkpoint has the head of a reward model; without one all scores are 0.

    Raises:
        DataError: A file of it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy") as opened:
                if "score.weight" in opened.keys():  # noqa: SIM118 (not iterable itself)
                    return True
        except SafetensorError as error:
            raise DataError(f"{file}: cannot be read: {error}. Copy it again.") from error
    return False
