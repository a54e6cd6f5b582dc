"""Training end to end against trl's GRPOTrainer: the same task, model, batch and optimizer.

    python -m benchmarks.trl_end_to_end [--quick] [--rounds N] [--json FILE]

The single-turn task of benchmarks/calls.yaml: 32 prompts x 8 samples a step, one optimizer step a
batch (trl's fastest setting), at most 12 new tokens, float32, no reference model. Both sides have
two cores: trl as one process with 1 and with 2 threads, of which the better counts; ours as a run
by `launch` with one thread in the rollout and one in the learner, everything Ray costs included,
start-up excluded on both sides. `equal work` computes every sample as trl does
(objective.skip_zero_advantage false); `defaults` leaves out those that teach nothing. trl's
process is up throughout and sleeps while ours runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    FILEROOT,
    ROOT,
    finish,
    median,
    options,
    ray_session,
    recipe_of,
    run,
    spread,
)

RECIPE = "benchmarks/calls.yaml"
SKIP = 8
"""Steps at the start of each run that do not count."""
OURS = {
    "equal work": ("objective.skip_zero_advantage=false",),
    "equal work, synchronous": (
        "objective.skip_zero_advantage=false",
        "admission.max_head_offpolicyness=0",
        "rollout.engine.num_threads=2",
        "learner.engine.num_threads=2",
    ),
    "defaults": (),
}
PROMISED = {"equal work": 1.5, "defaults": 2.0}
THREADS = (1, 2)


class Trl:
    """trl's trainer in a process of its own."""

    def __init__(self, model: Path, num_threads: int, lr: float) -> None:
        script = ["-m", "benchmarks.trl_worker", str(model), str(num_threads), str(lr)]
        self._process = subprocess.Popen(
            [sys.executable, *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        )
        self._listen()

    def steps(self, count: int) -> dict[str, Any]:
        """Take so many steps; what they came to."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._listen()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("FIGURES "):
                told: dict[str, Any] = json.loads(line.removeprefix("FIGURES "))
                return told
        raise RuntimeError("the trl process ended; run python -m benchmarks.trl_worker by hand")


def ours(variant: str, num_steps: int) -> dict[str, Any]:
    """One run of ours over its last `num_steps` steps."""
    steps = f"steps={SKIP + num_steps}"
    window = run(RECIPE, [f"name=calls-{variant}", steps, *OURS[variant]]).between(SKIP)
    return {
        "samples_per_s": window.total("reward/scored_episodes") / window.seconds,
        "reward": window.mean("reward/mean"),
        "staleness": window.mean("staleness/mean_versions"),
        "step_s": window.seconds / len(window.steps),
        "learner_s": window.total("time/learner_train_s") / len(window.steps),
        "publish_s": window.total("time/learner_publish_s") / len(window.steps),
        "waits_s": window.total("time/learner_wait_s") / len(window.steps),
        "rollout_s": window.total("time/rollout_busy_s") / len(window.steps),
        "driver_cpu_s": window.mean("driver/cpu_s"),
        "equal_groups": window.mean("learner/equal_reward_groups"),
    }


def compare(rounds: int, num_steps: int) -> dict[str, list[dict[str, Any]]]:
    """Figures by side, round by round."""
    model = FILEROOT / "calls-warm" / "model"
    if not (model / "config.json").exists():
        run("benchmarks/calls_warm.yaml", [])
    lr = recipe_of(RECIPE, []).learner.optimizer.lr
    others = {f"trl, {n} thread{'s' * (n > 1)}": Trl(model, n, lr) for n in THREADS}
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in (*others, *OURS)}
    try:
        for other in others.values():
            other.steps(3)  # the first ones are slower
        for _ in range(rounds):
            for name, other in others.items():
                figures[name].append(other.steps(max(6, num_steps // 3)))
            for variant in OURS:
                figures[variant].append(ours(variant, num_steps))
    finally:
        for other in others.values():
            other.close()
    return figures


def table(figures: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, and ratios to the better of trl's settings."""
    rates = {side: [one["samples_per_s"] for one in many] for side, many in figures.items()}
    best = max((side for side in rates if side.startswith("trl")), key=lambda s: median(rates[s]))
    lines = [f"{'side':24} {'trained samples/s':>22} {'reward':>7} {'ratio':>7}  ({best} = 1)"]
    for side, values in rates.items():
        ratio = median(values) / median(rates[best])
        pairs = [a / b for a, b in zip(values, rates[best], strict=True)]
        promised = PROMISED.get(side)
        verdict = ""
        if promised:
            verdict = f"  >= {promised:g}x " + ("met" if ratio >= promised else "NOT met")
        reward = median(one["reward"] for one in figures[side])
        lines.append(
            f"{side:24} {spread(values, 0):>22} {reward:7.2f} {ratio:6.2f}x"
            f"  ({min(pairs):.2f} to {max(pairs):.2f}){verdict}"
        )
    for side in OURS:
        parts = ("step_s", "rollout_s", "learner_s", "publish_s", "waits_s", "driver_cpu_s")
        told = ", ".join(f"{part} {median(o[part] for o in figures[side]):.3f}" for part in parts)
        lines.append(f"  {side}: {told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Run, print the table, write JSON if asked."""
    chosen = options(__doc__, arguments)
    rounds = chosen.rounds or (1 if chosen.quick else 5)
    with ray_session():
        figures = compare(rounds, 12 if chosen.quick else 36)
    finish(table(figures), figures, chosen.json)
    return figures


if __name__ == "__main__":
    main()
