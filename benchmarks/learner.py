"""Seconds of one GRPO step of the train engine against plain loops over the same model.

    python -m benchmarks.learner [--quick] [--rounds N] [--json FILE]

All sides run in this process on one thread, one after the other within each round, on the same
trajectories, with the same loss (their losses are compared) and AdamW. `plain` pads micro-batches
of 8 in random order and takes the logits of every position, as a first training script does;
`response head` does the same with the LM head on trained tokens alone. Processor seconds, which
on one thread are wall seconds on an idle machine. A ratio is that of the medians over the rounds.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from areal_ray.algorithms.losses import ppo_clip_loss
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.trajectory import Group, Outcome, Trajectory
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig, OptimizerConfig, TorchTrainConfig
from benchmarks.common import GSM8K_TOKENS, finish, median, options, spread, table
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

MICRO_BATCH = 8
Step = Callable[[Sequence[Group]], float]


class PlainLoop:
    """What a first training script does."""

    def __init__(self, folder: Path, objective: ObjectiveConfig, response_head: bool) -> None:
        self._model: Any = load_causal_model(folder, TorchTrainConfig())
        self._objective = objective
        self._response_head = response_head
        self._random = np.random.default_rng(0)
        self._adamw = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def step(self, groups: Sequence[Group]) -> float:
        """One update; the loss."""
        rows = []
        for group in groups:
            rewards = np.array([t.reward for t in group.trajectories], float)
            spread = rewards.std() or 1.0
            rows += list(zip(group.trajectories, (rewards - rewards.mean()) / spread, strict=True))
        order, total = self._random.permutation(len(rows)), 0.0
        for start in range(0, len(rows), MICRO_BATCH):
            loss = self._loss([rows[i] for i in order[start : start + MICRO_BATCH]], len(rows))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._adamw.step()
        self._adamw.zero_grad()
        return total

    def _loss(self, rows: Sequence[tuple[Trajectory, float]], num_rows: int) -> torch.Tensor:
        shape = len(rows), max(len(t.token_ids) for t, _ in rows)
        ids, trained = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        old, attended = torch.zeros(shape), torch.zeros(shape, dtype=torch.long)
        for place, (trajectory, _) in enumerate(rows):
            length = len(trajectory.token_ids)
            ids[place, :length] = torch.from_numpy(trajectory.token_ids)
            trained[place, :length] = torch.from_numpy(trajectory.loss_mask)
            old[place, :length] = torch.from_numpy(trajectory.behaviour_logprobs)
            attended[place, :length] = 1
        mask = trained[:, 1:]
        if self._response_head:
            hidden = self._model.base_model(ids, attended, use_cache=False).last_hidden_state
            logits = linear(hidden[:, :-1][mask], self._model.get_output_embeddings().weight)
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]
        else:
            table = torch.log_softmax(self._model(ids, attended, use_cache=False).logits, -1)
            logprobs = table[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][mask]
        counts = trained.sum(1, keepdim=True)
        advantages = torch.tensor([a for _, a in rows], dtype=torch.float32)[:, None]
        return ppo_clip_loss(
            logprobs, old[:, 1:][mask], advantages.expand_as(mask)[mask],
            torch.ones_like(logprobs, dtype=torch.bool),
            (1.0 / (counts * num_rows)).expand_as(mask)[mask],
            clip_range=self._objective.clip_range,
        )[0]  # fmt: skip


def loads(quick: bool) -> dict[str, tuple[dict[str, int], list[Group]]]:
    """Name -> model shape and trajectories."""
    rng = np.random.default_rng(0)
    small = {"vocab_size": 407}
    large = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
             "intermediate_size": 768}  # fmt: skip
    rewards: list[float | None] = [1.0, 0.0] * 4
    demo = [
        random_group(rng, n, siblings=8, prompt_tokens=30, turns=(10, 6), tool_tokens=6,
                     rewards=rewards)
        for n in range(8 if quick else 32)
    ]  # fmt: skip
    rows = GSM8K_TOKENS[:: 4 if quick else 1] * 2
    num_groups = 1 if quick else 4
    shared = [
        _group(rng, n, [GSM8K_TOKENS[3 + 4 * n][0]] * 8, [GSM8K_TOKENS[2 * i][1] for i in range(8)])
        for n in range(num_groups)
    ]
    return {
        "demo: 32 groups of 8, 30-token prompt": (small, demo),
        "equal lengths, nothing shared": (large, _pairs(rng, [(80, 144)] * len(rows))),
        "GSM8K lengths, nothing shared": (large, _pairs(rng, rows)),
        "GSM8K lengths, 4 groups of 8": (large, shared),
    }


def _pairs(rng: np.random.Generator, rows: Sequence[tuple[int, int]]) -> list[Group]:
    """Groups of two rows of so many prompt and answer tokens, which share no token."""
    found = []
    for number in range(0, len(rows), 2):
        prompts, answers = zip(*rows[number : number + 2], strict=True)
        found.append(_group(rng, number, prompts, answers))
    return found


def _group(
    rng: np.random.Generator, number: int, prompts: Sequence[int], answers: Sequence[int]
) -> Group:
    """A trajectory for each prompt and answer length; more than two share one prompt."""
    shared = rng.integers(4, 2048, prompts[0])
    trajectories = []
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        begin = shared if len(prompts) > 2 else rng.integers(4, 2048, prompt)
        mask = np.arange(prompt + answer) >= prompt
        trajectories.append(
            Trajectory(
                token_ids=np.concatenate([begin, rng.integers(4, 2048, answer)]).astype(np.int32),
                loss_mask=mask,
                behaviour_logprobs=np.where(mask, rng.normal(-7.6, 0.3, len(mask)), 0.0).astype(
                    np.float32
                ),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int16),
                task_id=f"task-{number}",
                group_id=f"group-{number}",
                episode_id=f"group-{number}/{place}",
                reward=float(place % 2),
                outcome=Outcome.OK,
            )
        )
    return Group(f"group-{number}", f"task-{number}", tuple(trajectories))


def sides(folder: Path) -> dict[str, Step]:
    """Name -> one step."""
    objective = ObjectiveConfig(skip_zero_advantage=False)
    config = LearnerConfig(
        engine=TorchTrainConfig(max_tokens_per_mb=2048),
        optimizer=OptimizerConfig(lr=1e-4, betas=(0.9, 0.999)),
    )
    engine = TorchTrainEngine(folder, config, objective=objective)
    return {
        "areal_ray": lambda groups: engine.train_step([groups], 0).metrics["learner/loss"],
        "plain": PlainLoop(folder, objective, response_head=False).step,
        "response head": PlainLoop(folder, objective, response_head=True).step,
    }


def measure(shape: dict[str, int], groups: list[Group], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each round's step by side; a first round warms up and is compared."""
    with tempfile.TemporaryDirectory() as folder:
        ours = sides(write_tiny_model(folder, **shape))
    torch.set_num_threads(1)
    losses = [step(groups) for step in ours.values()]
    if max(losses) - min(losses) > 1e-4:
        raise SystemExit(f"the sides disagree on the loss: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in ours}
    for _ in range(rounds):
        for name, step in ours.items():
            began = time.process_time()
            step(groups)
            seconds[name].append(time.process_time() - began)
    return seconds


COLUMNS = (
    ("load", 38), ("areal_ray s", 22), ("plain s", 22), ("response head s", 22),
    ("of plain", 9), ("of response head", 17),
)  # fmt: skip


def cells(name: str, seconds: dict[str, list[float]]) -> list[str]:
    """One line of the table: medians with their range, and the ratios of the medians."""
    own, plain, head = (median(seconds[side]) for side in ("areal_ray", "plain", "response head"))
    return [
        name,
        *(spread(values, 3) for values in seconds.values()),
        f"{own / plain:.2f}",
        f"{own / head:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run, print the table, write JSON if asked."""
    chosen = options(__doc__, arguments)
    rounds = chosen.rounds or (2 if chosen.quick else 5)
    figures = {
        name: measure(shape, groups, rounds)
        for name, (shape, groups) in loads(chosen.quick).items()
    }
    finish(table(COLUMNS, [cells(*item) for item in figures.items()]), figures, chosen.json)
    return figures


if __name__ == "__main__":
    main()
