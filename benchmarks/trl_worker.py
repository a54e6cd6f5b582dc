"""The other side: trl's GRPOTrainer on the same model and task, stopped and started from outside.

    python -m benchmarks.trl_worker MODEL THREADS LEARNING_RATE

Reads a number of steps from standard input, takes them, answers with a JSON line, and so on.
"""

import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks.calls_reward import score
from recipes.calculator.tasks import train

PROMPTS, SAMPLES = 32, 8


class Stopwatch(TrainerCallback):
    """Times blocks of steps as they are asked for; between blocks the process sleeps."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self._left = 0
        self._asked = 0
        self._began = self._began_cpu = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before a step: wait for the next order if the last one is done."""
        if self._left:
            return
        line = sys.stdin.readline()
        if not line.strip():
            sys.exit(0)
        self._asked = self._left = int(line)
        self.rewards.clear()
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After a step: tell, if it was the last of the order."""
        self._left -= 1
        if self._left:
            return
        seconds = time.perf_counter() - self._began
        told = {
            "seconds": seconds,
            "cpu_s": time.process_time() - self._began_cpu,
            "samples_per_s": self._asked * PROMPTS * SAMPLES / seconds,
            "reward": sum(self.rewards) / max(1, len(self.rewards)),
        }
        _tell(told)


def _tell(told: dict[str, Any]) -> None:
    print("FIGURES " + json.dumps(told), flush=True)


def main(model: str, num_threads: int, lr: float) -> None:
    """Train until standard input ends."""
    torch.set_num_threads(num_threads)
    transformers_logging.set_verbosity_error()
    watch = Stopwatch()

    def reward(completions: list[Any], expression: list[str], **_: Any) -> list[float]:
        scores = [
            score(said[0]["content"], asked)
            for said, asked in zip(completions, expression, strict=True)
        ]
        watch.rewards.extend(scores)
        return scores

    rows = [{"prompt": list(t.messages), "expression": t.fields["expression"]} for t in train()]
    config = GRPOConfig(
        output_dir="/nonexistent",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        num_iterations=1,
        max_completion_length=12,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_steps=100_000,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[watch],
    )
    _tell({"ready": True})
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
