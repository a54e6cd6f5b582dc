"""How much of a model changes from one published version to the next, bit by bit, on real runs.

    python -m benchmarks.weight_changes [--quick] [--smollm2 FOLDER] [--steps N] [--json FILE]

Whole runs by `launch` with `weights.transport: disk`: each version's file is compared with that of
the one before, as it is (float32) and as it would be with `weights.dtype: bfloat16`. The demo
learns at its own rate; SmolLM2-135M (recipes/arithmetic/fetch_smollm2.py FOLDER) by GRPO and
supervised (steps of the train engine alone, on sums) at learning rates of 1e-6 and 1e-5, in small
steps; steps that trained on nothing do not count. An update that sends the changed elements alone
needs for each its value and either 4 bytes of index or, of the whole model, a bit an element;
`delta` is the smaller of the two as a share of the full version's bytes.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from areal_ray.agents import Task
from areal_ray.engines.sft import SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig, OptimizerConfig
from areal_ray.runtime.weight_files import VERSIONS_FOLDER
from areal_ray.telemetry.views import StepView
from benchmarks.common import FILEROOT, finish, median, ray_session, recipe_of, run, table
from recipes.arithmetic.tasks import train

_INDEX_BYTES = 4


@dataclass(frozen=True)
class Change:
    """Between two versions, in one precision."""

    version: int
    dtype: str
    share: float
    """Of the elements that differ in at least one bit."""
    delta: float
    """Bytes of the changed elements and of where they stand, of those of all elements."""
    compare_s: float
    """To find them, on one thread."""


def change(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], version: int) -> Change:
    """Compare all tensors of two versions."""
    changed = total = 0
    itemsize = 1
    began_s = time.perf_counter()
    for name, tensor in new.items():
        itemsize = tensor.element_size()
        bits = {2: torch.int16, 4: torch.int32}[itemsize]
        changed += int(torch.count_nonzero(tensor.view(bits) != old[name].view(bits)))
        total += tensor.numel()
    compare_s = time.perf_counter() - began_s
    where_bytes = min(changed * _INDEX_BYTES, total / 8)
    dtype = str(next(iter(new.values())).dtype).removeprefix("torch.")
    delta = (changed * itemsize + where_bytes) / (total * itemsize)
    return Change(version, dtype, changed / total, delta, compare_s)


class Comparison:
    """Reads the versions of a run as they are published."""

    def __init__(self, folder: Path) -> None:
        self.changes: list[Change] = []
        self._folder = folder
        self._before: tuple[int, dict[str, torch.Tensor]] | None = None

    def on_step(self, view: StepView) -> None:
        """Compare the version of this step with that of the step before."""
        if view.version is None:
            return
        new = _read(self._folder / f"version-{view.version:06d}.safetensors")
        if self._before is not None and self._before[0] == view.version - 1 and not view.skipped:
            self.changes += both_precisions(self._before[1], new, view.version)
        self._before = (view.version, new)


def both_precisions(
    old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], version: int
) -> list[Change]:
    """The change as it is, and as it would be cast to bfloat16."""
    halves = ({name: t.to(torch.bfloat16) for name, t in side.items()} for side in (old, new))
    return [change(old, new, version), change(*halves, version)]


def _read(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def measure(title: str, recipe: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Medians of one run, a row for each precision."""
    every = ["weights.transport=disk", "evaluation=null", *overrides]
    folder = recipe_of(recipe, every).folder / VERSIONS_FOLDER
    comparison = Comparison(folder)
    run(recipe, every, comparison.on_step)
    return _rows(title, comparison.changes)


def measure_supervised(title: str, folder: Path, rate: float, steps: int) -> list[dict[str, Any]]:
    """The same for supervised steps of a train engine, eight sums each."""
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=rate))
    engine = TorchTrainEngine(folder, learner, total_steps=steps)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums, changes = train(), []
    for step in range(steps):
        old = {name: tensor.clone() for name, tensor in engine.weights().items()}
        engine.sft_step([_example(tokenizer, task) for task in sums[8 * step :][:8]])
        changes += both_precisions(old, dict(engine.weights()), step + 1)
    engine.close()
    return _rows(title, changes)


def _example(tokenizer: Any, task: Task) -> SftExample:
    asked = tokenizer.apply_chat_template(
        list(task.messages), add_generation_prompt=True, return_dict=False
    )
    reply = [*tokenizer.encode(str(task.answer)), tokenizer.eos_token_id]
    mask = np.arange(len(asked) + len(reply)) >= len(asked)
    return SftExample(np.array(asked + reply, dtype=np.int32), mask)


def _rows(title: str, changes: list[Change]) -> list[dict[str, Any]]:
    rows = []
    for dtype in ("float32", "bfloat16"):
        seen = [one for one in changes if one.dtype == dtype]
        if not seen:
            print(f"{title}: no step trained on anything; give more --steps")
            continue
        rows.append(
            {
                "run": title,
                "dtype": dtype,
                "versions": len(seen),
                "share": median(one.share for one in seen),
                "largest": max(one.share for one in seen),
                "delta": median(one.delta for one in seen),
                "compare_s": median(one.compare_s for one in seen),
                "all": [asdict(one) for one in seen],
            }
        )
    return rows


COLUMNS = (
    ("run", 29), ("on the wire", 11), ("versions", 8), ("changed", 9), ("most", 9),
    ("delta bytes", 11), ("compare ms", 10),
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        row["run"],
        row["dtype"],
        str(row["versions"]),
        f"{row['share']:.2%}",
        f"{row['largest']:.2%}",
        f"{row['delta']:.1%}",
        f"{1e3 * row['compare_s']:.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the demo alone, few steps")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--smollm2", type=Path, help="checkpoint folder; else the demo alone")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args(arguments)
    steps = 4 if options.quick else options.steps
    rates = () if options.quick or options.smollm2 is None else ("1e-6", "1e-5")
    rows = []
    for rate in rates:
        title = f"SmolLM2, supervised, lr {rate}"
        rows += measure_supervised(title, options.smollm2, float(rate), steps)
    with ray_session():
        rows += measure("demo, GRPO, lr 1e-3", "recipes/calculator/grpo.yaml", [f"steps={steps}"])
        for rate in rates:
            overrides = [
                f"model.path={options.smollm2.resolve()}",
                f"steps={steps}",
                f"name=changes-{rate}",
                f"learner.optimizer.lr={float(rate)}",
                "admission.groups_per_step=4",
            ]
            recipe = "recipes/arithmetic/smollm2_cpu.yaml"
            rows += measure(f"SmolLM2, GRPO, lr {rate}", recipe, overrides)
    finish(table(COLUMNS, map(cells, rows)), rows, options.json)
    return rows


if __name__ == "__main__":
    FILEROOT.mkdir(parents=True, exist_ok=True)
    main()
