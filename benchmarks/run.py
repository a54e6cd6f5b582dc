"""All benchmarks, one after the other: what `make bench` runs.

    python -m benchmarks.run [--quick] [--only NAME] [--out FOLDER]

Each can also be run alone; its first lines say what is compared and how. The full set takes about
three quarters of an hour on two idle cores; figures from a busy machine mean little.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import FILEROOT, ROOT, machine_load

PARTS: dict[str, tuple[str, ...]] = {
    "sampling": ("benchmarks.sampling",),
    "engines": ("benchmarks.engines",),
    "engines_smollm2": ("benchmarks.engines", "--smollm2"),
    "learner": ("benchmarks.learner",),
    "gateway": ("benchmarks.gateway",),
    "publish": ("benchmarks.publish",),
    "weight_changes": ("benchmarks.weight_changes",),
    "driver_overhead": ("benchmarks.driver_overhead",),
    "trl_end_to_end": ("benchmarks.trl_end_to_end",),
    "asynchrony": ("benchmarks.asynchrony",),
    "learning": ("benchmarks.asynchrony", "--learning"),
}
"""Name -> module and options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them, each in a process of its own; the number that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few, short rounds")
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=FILEROOT, help="where the figures go")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for name in chosen.only or PARTS:
        module, *given = PARTS[name]
        command = [sys.executable, "-m", module, *given, *(["--quick"] if chosen.quick else [])]
        command += ["--json", str(chosen.out / f"{name}.json")]
        print(f"\n== {name}: python {' '.join(command[1:])}\n   {machine_load()}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        num_failed += code != 0
        told = "done" if code == 0 else f"FAILED with exit code {code}"
        print(f"   {told} in {time.monotonic() - began:.0f} s", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
