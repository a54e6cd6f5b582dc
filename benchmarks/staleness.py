"""What staleness does to learning, by bound and objective, on the real asynchronous system.

    python -m benchmarks.staleness [--quick] [--why] [--seeds N] [--steps N] [--json FILE]

Whole runs of recipes/calculator/grpo.yaml by `launch`, from the same warm start for each seed:
max_head_offpolicyness 0, 2, 4 and 8 under PPO clip around the sampling policy, decoupled PPO, and
decoupled PPO with IcePop's and KPop's masks, each with its documented settings. Rollouts run ahead
as far as they may, so that most groups are near the bound. Held-out accuracy after the last step
and its largest fall below the best so far tell learning and collapse; the KL is the largest of a
step between the sampling policy and the learner's. Seeds are the outer loop: a table of fewer
seeds than asked is complete for those. One seed misleads; claim what five show. --why: instead,
decoupled PPO at bound 8 with half the learning rate and with a quarter of the clip.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    FILEROOT,
    end_of,
    finish,
    ray_session,
    recipe_of,
    run,
    start,
    table,
)

RECIPE = "recipes/calculator/grpo.yaml"
BOUNDS = (0, 2, 4, 8)
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "PPO clip": ("objective.kind=grpo",),
    "decoupled": ("objective.kind=decoupled_ppo",),
    "decoupled + IcePop": ("objective.kind=icepop",),
    "decoupled + KPop": ("objective.kind=kpop",),
}
EPS_CLIP = 0.2
Asked = tuple[int, str, tuple[str, ...]]
"""Bound, name and overrides of a run."""
SIDE_BY_SIDE = 2
"""Runs at once: as many as there are cores."""


def asked_runs(why: bool) -> list[Asked]:
    """What each seed runs; `why`: what keeps decoupled PPO nearer to the policy that sampled."""
    if why:
        half = recipe_of(RECIPE, ()).learner.optimizer.lr / 2
        decoupled = OBJECTIVES["decoupled"]
        return [
            (8, "decoupled, lr / 2", (*decoupled, f"learner.optimizer.lr={half}")),
            (8, "decoupled, clip / 4", (*decoupled, f"objective.eps_clip={EPS_CLIP / 4}")),
        ]
    return [(bound, name, given) for bound in BOUNDS for name, given in OBJECTIVES.items()]


def runs_of(seed: int, asked: Sequence[Asked], num_steps: int) -> list[dict[str, Any]]:
    """One row for each of the runs."""
    if not (FILEROOT / f"calculator-warm-{seed}" / "model" / "config.json").exists():
        run("recipes/calculator/sft.yaml", [f"seed={seed}"])
    rows = []
    for first in range(0, len(asked), SIDE_BY_SIDE):
        some = asked[first : first + SIDE_BY_SIDE]
        under_way = [_start(seed, run_asked, num_steps) for run_asked in some]
        for (bound, name, _), handle in zip(some, under_way, strict=True):
            row = _row(seed, bound, name, end_of(handle))
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def _start(seed: int, asked: Asked, num_steps: int) -> Any:
    bound, name, overrides = asked
    words = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    return start(
        RECIPE,
        [
            f"name=staleness-{bound}-{words}-{seed}",
            f"seed={seed}",
            f"steps={num_steps}",
            f"admission.max_head_offpolicyness={bound}",
            "objective.eps_clip_higher=null",
            f"objective.eps_clip={EPS_CLIP}",
            *overrides,
        ],
    )


def _row(seed: int, bound: int, name: str, done: Any) -> dict[str, Any]:
    curve = [point.accuracy for point in done.summary.eval.curve]
    steps = [row for row in done.rows if row["kind"] == "step"]
    return {
        "seed": seed,
        "bound": bound,
        "objective": name,
        "before": done.summary.eval.before,
        "after": done.summary.eval.after,
        "fell_back": largest_fall(curve),
        "staleness": done.summary.staleness.mean,
        "max_staleness": done.summary.staleness.max,
        "rejected": statistics.fmean(row.get("learner/rejected_fraction") or 0.0 for row in steps),
        "clipped": statistics.fmean(row.get("learner/clipped_fraction") or 0.0 for row in steps),
        "behaviour_kl": max(row.get("learner/behaviour_kl_nats") or 0.0 for row in steps),
        "reward_last": statistics.fmean(row["reward/mean"] for row in steps[-5:]),
        "curve": curve,
    }


def largest_fall(curve: Sequence[float]) -> float:
    """By how much a curve lies below its best value so far, at worst."""
    best = fall = 0.0
    for value in curve:
        best = max(best, value)
        fall = max(fall, best - value)
    return fall


def accuracy_table(rows: Sequence[dict[str, Any]]) -> str:
    """Median (lowest to highest) held-out accuracy after the last step; and what went with it."""
    columns = [("bound", 5), ("objective", 20), ("held-out after, median", 24), ("reward", 7)]
    columns += [("fell back (worst)", 18), ("staleness", 10), ("KL", 6), ("clipped", 8)]
    columns += [("rejected", 9)]
    lines = []
    for bound, name in dict.fromkeys((row["bound"], row["objective"]) for row in rows):
        some = [r for r in rows if r["bound"] == bound and r["objective"] == name]
        lines.append(_line(bound, name, some))
    return table(columns, lines)


def _line(bound: int, name: str, some: Sequence[dict[str, Any]]) -> list[str]:
    after = [row["after"] for row in some]

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in some)

    falls = [row["fell_back"] for row in some]
    return [
        str(bound),
        name,
        f"{statistics.median(after):.3f} ({min(after):.3f} to {max(after):.3f})",
        f"{mean('reward_last'):.3f}",
        f"{statistics.median(falls):.3f} ({max(falls):.3f})",
        f"{mean('staleness'):.2f}",
        f"{mean('behaviour_kl'):.2f}",
        f"{mean('clipped'):.1%}",
        f"{mean('rejected'):.2%}",
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, ten steps")
    parser.add_argument("--why", action="store_true", help="why decoupled PPO falls back")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with ray_session(num_cpus=8):
        for seed in range(1 if chosen.quick else chosen.seeds):
            rows += runs_of(seed, asked_runs(chosen.why), 10 if chosen.quick else chosen.steps)
            print(accuracy_table(rows), flush=True)
    finish(accuracy_table(rows), rows, chosen.json)
    return rows


if __name__ == "__main__":
    main()
