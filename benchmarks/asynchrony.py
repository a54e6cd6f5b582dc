"""Asynchronous against synchronous training, same recipe, with a slow tool.

    python -m benchmarks.asynchrony [--quick] [--rounds N] [--json FILE] [--learning [--seeds N]]

Speed: whole runs of recipes/calculator/slow_tool.yaml by `launch`, interleaved, at
max_head_offpolicyness 0 (synchronous) and 2, the latter with at_consumption `wait` and `drop`; the
tool's latency is log-normal, median 0.3 s, sigma 1.0 and 0.5, and none. Trained trajectories per
second come from the rows after the first steps of a run, so that start-up and filling up are left
out. All begin from a policy that calls the tool in nearly every episode, as the recipe's own warm
start does not yet.

--learning: instead, the recipe from its warm start, for each seed once a policy, side by side;
held-out accuracy after the last step.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import FILEROOT, end_of, finish, median, ray_session, run, spread, start

RECIPE = "recipes/calculator/slow_tool.yaml"
POLICIES = {
    "synchronous": ("admission.max_head_offpolicyness=0",),
    "wait": ("admission.max_head_offpolicyness=2", "admission.at_consumption=wait"),
    "drop": ("admission.max_head_offpolicyness=2", "admission.at_consumption=drop"),
}
SIGMAS: dict[str, float | None] = {"sigma 1.0": 1.0, "sigma 0.5": 0.5, "no latency": None}
PROMISED = {("sigma 1.0", "wait"): 2.0, ("sigma 1.0", "drop"): 3.0}
FILLING = {"synchronous": 1, "wait": 4, "drop": 4}
"""Steps until as many groups are under way as will be."""


@dataclass(frozen=True)
class Speed:
    """One run's figures."""

    trajectories_per_s: float
    dropped_share: float
    staleness: float
    """Mean, in versions."""
    max_staleness: float
    step_s: float
    waits_s: float
    """Of a step, that the learner waits for groups."""
    rollout_busy_s: float
    learner_busy_s: float


def fluent_policy(quick: bool) -> Path:
    """A checkpoint that calls the tool nearly always: made once by the recipe without latency."""
    model = FILEROOT / "calculator-fluent" / "model"
    if not (model / "config.json").exists():
        steps = 16 if quick else 24
        run("recipes/calculator/grpo.yaml", ["name=calculator-fluent", f"steps={steps}"])
    return model


def measure(policy: str, latency: str, model: Path, num_steps: int) -> Speed:
    """Speed of one run over its last `num_steps` steps."""
    skip = FILLING[policy]
    done = run(
        RECIPE,
        [
            f"name=asynchrony-{policy}",
            f"steps={skip + num_steps}",
            f"model.path={model}",
            "model.create=null",
            "evaluation=null",
            *_latency(SIGMAS[latency]),
            *POLICIES[policy],
        ],
    )
    window = done.between(skip)
    dropped = window.total("queue/dropped_groups")
    consumed = 32.0 * len(window.steps)
    per_step = 1.0 / len(window.steps)
    return Speed(
        trajectories_per_s=window.total("reward/scored_episodes") / window.seconds,
        dropped_share=dropped / (dropped + consumed),
        staleness=window.mean("staleness/mean_versions"),
        max_staleness=max(row["staleness/max_versions"] for row in window.steps),
        step_s=window.seconds * per_step,
        waits_s=window.total("time/learner_wait_s") * per_step,
        rollout_busy_s=window.total("time/rollout_busy_s") * per_step,
        learner_busy_s=window.total("time/learner_train_s") * per_step,
    )


def _latency(sigma: float | None) -> list[str]:
    if sigma is None:
        return ["agent.args={}"]
    return [f"agent.args={{tool_latency_median_s: 0.3, tool_latency_sigma: {sigma}}}"]


def compare_speed(rounds: int, quick: bool, latencies: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each latency and policy; the policies of a round one after the other."""
    steps = {"synchronous": 4, "wait": 8, "drop": 10} if quick else _STEPS
    model = fluent_policy(quick)
    rows = []
    for latency in latencies:
        speeds: dict[str, list[Speed]] = {policy: [] for policy in POLICIES}
        for _ in range(rounds):
            for policy in POLICIES:
                speeds[policy].append(measure(policy, latency, model, steps[policy]))
        rows += [_row(latency, policy, speeds) for policy in POLICIES]
        print(table(rows[-len(POLICIES) :]), flush=True)
    return rows


_STEPS = {"synchronous": 5, "wait": 10, "drop": 12}


def _row(latency: str, policy: str, speeds: dict[str, list[Speed]]) -> dict[str, Any]:
    mine = speeds[policy]
    rates = [speed.trajectories_per_s for speed in mine]
    baseline = [speed.trajectories_per_s for speed in speeds["synchronous"]]
    return {
        "latency": latency,
        "policy": policy,
        "trajectories_per_s": rates,
        "ratio": median(rates) / median(baseline),
        "ratios": [a / b for a, b in zip(rates, baseline, strict=True)],
        "dropped_share": statistics.fmean(speed.dropped_share for speed in mine),
        "staleness": statistics.fmean(speed.staleness for speed in mine),
        "max_staleness": max(speed.max_staleness for speed in mine),
        "step_s": median(speed.step_s for speed in mine),
        "waits_s": median(speed.waits_s for speed in mine),
        "rollout_busy_s": median(speed.rollout_busy_s for speed in mine),
        "learner_busy_s": median(speed.learner_busy_s for speed in mine),
        "promised": PROMISED.get((latency, policy)),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f"{'latency':11} {'policy':12} {'trained trajectories/s':>24} {'ratio':>6} {'(range)':>13}"
        f" {'dropped':>8} {'staleness':>10} {'max':>4} {'step s':>7} {'waits s':>8}"
        f" {'rollout s':>10} {'learner s':>10}"
    ]
    for row in rows:
        ratios = row["ratios"]
        promised = row["promised"]
        verdict = ""
        if promised:
            verdict = f"  >= {promised:g}x " + ("met" if row["ratio"] >= promised else "NOT met")
        lines.append(
            f"{row['latency']:11} {row['policy']:12} {spread(row['trajectories_per_s'], 0):>24}"
            f" {row['ratio']:5.2f}x {min(ratios):6.2f}-{max(ratios):5.2f}x"
            f" {row['dropped_share']:8.1%} {row['staleness']:10.2f} {row['max_staleness']:4.0f}"
            f" {row['step_s']:7.2f} {row['waits_s']:8.2f} {row['rollout_busy_s']:10.2f}"
            f" {row['learner_busy_s']:10.2f}{verdict}"
        )
    return "\n".join(lines)


def compare_learning(seeds: int, num_steps: int) -> list[dict[str, Any]]:
    """Held-out accuracy of every policy after the same number of steps, seed by seed.

    The policies of a seed run side by side: nothing here is a matter of time.
    """
    rows = []
    for seed in range(seeds):
        if not (FILEROOT / f"calculator-warm-{seed}" / "model" / "config.json").exists():
            run("recipes/calculator/sft.yaml", [f"seed={seed}"])
        common = [f"seed={seed}", f"steps={num_steps}", "evaluation.every_steps=0"]
        under_way = {
            policy: start(RECIPE, [f"name=learning-{policy}-{{seed}}", *common, *overrides])
            for policy, overrides in POLICIES.items()
        }
        for policy, handle in under_way.items():
            summary = end_of(handle).summary
            ledger = summary.ledger
            rows.append(
                {
                    "seed": seed,
                    "policy": policy,
                    "before": summary.eval.before,
                    "after": summary.eval.after,
                    "dropped_share": ledger.dropped / (ledger.trained + ledger.dropped),
                    "max_staleness": summary.staleness.max,
                }
            )
            print(rows[-1], flush=True)
    return rows


def learning_table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy after the last step by policy."""
    lines = [f"{'policy':12} {'held-out accuracy after the last step, by seed':50} mean"]
    for policy in POLICIES:
        after = [row["after"] for row in rows if row["policy"] == policy]
        listed = "  ".join(f"{value:.3f}" for value in after)
        lines.append(f"{policy:12} {listed:50} {statistics.fmean(after):.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, short runs, sigma 1.0")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, at least 5 for a figure")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--latency", choices=SIGMAS, action="append", help="default: all")
    parser.add_argument("--learning", action="store_true", help="accuracy instead of speed")
    parser.add_argument("--seeds", type=int, default=5, help="of --learning")
    parser.add_argument("--steps", type=int, default=20, help="of --learning")
    chosen = parser.parse_args(arguments)
    with ray_session(num_cpus=8 if chosen.learning else None):
        if chosen.learning:
            rows = compare_learning(1 if chosen.quick else chosen.seeds, chosen.steps)
            text = learning_table(rows)
        else:
            rounds = chosen.rounds or (1 if chosen.quick else 5)
            latencies = chosen.latency or (["sigma 1.0"] if chosen.quick else list(SIGMAS))
            rows = compare_speed(rounds, chosen.quick, latencies)
            text = table(rows)
    finish(text, rows, chosen.json)
    return rows


if __name__ == "__main__":
    main()
