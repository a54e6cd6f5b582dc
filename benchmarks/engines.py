"""Sampling speed of the embedded engine against transformers and vLLM on the CPU, side by side.

    python -m benchmarks.engines [--smollm2] [--quick] [--rounds N] [--json FILE]

Four sides: the embedded engine, `generate` of Transformers, its continuous batching and vLLM's
build for the CPU (benchmarks/engine_sides.py says how each is set up), each in a process of its own
that stays warm. Every round has prompts of its own, the same for all sides, which sample it one
after the other; the first round only warms up. All is done with one thread a side and then with
two; a side is given the better of the two. A ratio is that of the medians over the rounds.

The demo's model, or with `--smollm2` SmolLM2-135M (fetched once by recipes/arithmetic/
fetch_smollm2.py into the benchmarks' folder) on fewer loads. Lengths `as in GSM8K` are those of
its questions and answers (`common.GSM8K_TOKENS`).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import FILEROOT, GSM8K_TOKENS, ROOT, finish, median, table
from benchmarks.engine_sides import SIDES
from benchmarks.sampling import without_stop_tokens
from tests.support.tiny_models import write_tiny_model

OURS = "embedded"
FETCH = ROOT / "recipes" / "arithmetic" / "fetch_smollm2.py"


@dataclass(frozen=True)
class Load:
    """A batch whose prompts are drawn anew each round."""

    name: str
    prompt_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    copies: int = 1
    """Turns that share each prompt."""

    def message(self, vocab_size: int, seed: int) -> dict[str, Any]:
        """What the sides are given in a round."""
        random = np.random.default_rng(seed)
        made = [random.integers(3, vocab_size, n).tolist() for n in self.prompt_lengths]
        return {
            "prompts": [prompt for prompt in made for _ in range(self.copies)],
            "lengths": self.lengths,
        }


def loads(*, is_large: bool, quick: bool) -> list[Load]:
    """What the sides are compared on."""
    random = np.random.default_rng(0)

    def drawn(count: int, low: int, high: int) -> tuple[int, ...]:
        return tuple(random.integers(low, high + 1, count).tolist())

    def as_in_gsm8k(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        chosen = [GSM8K_TOKENS[(8 + 5 * i) % 16] for i in range(count)]
        return tuple(question for question, _ in chosen), tuple(answer for _, answer in chosen)

    if is_large:
        made = [
            Load("16 turns of 16", drawn(16, 18, 33), (16,) * 16),
            Load("16 turns of 8..64", drawn(16, 18, 33), drawn(16, 8, 64)),
            Load("64 turns of 8..32", drawn(64, 18, 33), drawn(64, 8, 32)),
            Load("16 turns of 16, 8 to a prompt of 128", (128, 128), (16,) * 16, copies=8),
            Load("1 turn of 32", (26,), (32,)),
        ]
        return made[1:2] if quick else made
    made = []
    for count in (64, 16, 1):
        turns = f"{count} turn{'s' if count > 1 else ''}"
        made.append(Load(f"{turns} of 32", drawn(count, 18, 33), (32,) * count))
        if count > 1:
            spread = drawn(count, 8, 64)
            made.append(Load(f"{turns} of 8..64", drawn(count, 18, 33), spread))
            made.append(
                Load(f"{turns} of 8..64, 8 to a prompt of 128", (128,) * (count // 8), spread, 8)
            )
        made.append(Load(f"{turns} as in GSM8K", *as_in_gsm8k(count)))
    return made[1:2] if quick else made


class SideProcess:
    """A side in its process."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.engine_sides", name, folder, str(threads)]
        # Threads that wait must not spin: the other sides run meanwhile.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            cwd=ROOT, env=environment, text=True,
        )  # fmt: skip

    def answer(self) -> dict[str, float]:
        """The next answer; the first says that it has started."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().decode(errors="replace").splitlines()[-12:]
            raise SystemExit(f"{self.name}: the side ended:\n" + "\n".join(last))
        return dict(json.loads(line))

    def sample(self, message: dict[str, Any]) -> dict[str, float]:
        """Have it sample a round's load."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def started(folder: Path, threads: int) -> Iterator[list[SideProcess]]:
    """All sides, ready."""
    sides = []
    try:
        for name in SIDES:  # one after the other: they share the cores
            sides.append(SideProcess(name, folder, threads))
            sides[-1].answer()
        yield sides
    finally:
        for side in sides:
            side.close()


def measured(
    folder: Path, chosen: Sequence[Load], rounds: int, threads: int, vocab_size: int
) -> dict[tuple[str, str], dict[str, float]]:
    """(load, side) -> medians of wall and processor seconds over the rounds."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with started(folder, threads) as sides:
        for turn in range(rounds + 1):
            for place, load in enumerate(chosen):
                message = load.message(vocab_size, 1000 * turn + place)
                told = {side.name: side.sample(message) for side in sides}
                _check(load, told)
                if turn:
                    for name, answer in told.items():
                        found.setdefault((load.name, name), []).append(answer)
    return {
        key: {unit: median([a[unit] for a in answers]) for unit in ("wall_s", "cpu_s")}
        for key, answers in found.items()
    }


def _check(load: Load, told: dict[str, dict[str, float]]) -> None:
    """All sampled what was asked for, from the same distribution by their own log-probs."""
    for name, answer in told.items():
        if answer["tokens"] != sum(load.lengths):
            raise SystemExit(f"{name}: {answer['tokens']} tokens, asked for {sum(load.lengths)}")
    means = [answer["logprob"] / answer["tokens"] for answer in told.values()]
    if max(means) - min(means) > 8.0 / len(load.lengths) ** 0.5:  # a turn alone may go anywhere
        raise SystemExit(f"{load.name}: mean log-probs differ between the sides: {told}")


def compared(
    chosen: Sequence[Load], medians: dict[int, dict[tuple[str, str], dict[str, float]]]
) -> list[dict[str, Any]]:
    """One row for each load: tokens per second of each side at its better thread count."""
    rows = []
    for load in chosen:
        tokens = sum(load.lengths)
        row: dict[str, Any] = {"load": load.name, "tokens": tokens}
        for name in SIDES:
            wall = {n: found[load.name, name]["wall_s"] for n, found in medians.items()}
            row[f"{name}_threads"] = min(wall, key=wall.__getitem__)
            row[f"{name}_tokens_per_s"] = tokens / min(wall.values())
            if 1 in medians:
                row[f"{name}_one_thread_cpu_s"] = medians[1][load.name, name]["cpu_s"]
        for name in SIDES:
            if name != OURS:
                row[f"of_{name}"] = row[f"{OURS}_tokens_per_s"] / row[f"{name}_tokens_per_s"]
                if 1 in medians:
                    cpu = row[f"{name}_one_thread_cpu_s"] / row[f"{OURS}_one_thread_cpu_s"]
                    row[f"of_{name}_one_thread_cpu"] = cpu
        rows.append(row)
    return rows


COLUMNS = (
    ("load", 38), ("embedded", 12), ("generate", 12), ("continuous", 12), ("vllm", 12),
    ("of generate", 12), ("of cont.", 9), ("of vllm", 9),
)  # fmt: skip
NOTE = (
    "(tokens/s, threads in brackets; ratios of the embedded engine's tokens/s, in brackets with "
    "one thread by processor time)"
)


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    speeds = [f"{row[f'{n}_tokens_per_s']:,.0f} ({row[f'{n}_threads']})" for n in SIDES]
    ratios = [
        f"{row[f'of_{name}']:.2f} ({row.get(f'of_{name}_one_thread_cpu', 0.0):.2f})"
        for name in SIDES
        if name != OURS
    ]
    return [row["load"], *speeds, *ratios]


def model(scratch: Path, *, is_large: bool) -> tuple[Path, int]:
    """A folder of the model without stop tokens, and its vocabulary's size."""
    folder = scratch / "model"
    if not is_large:
        write_tiny_model(folder, "qwen3", vocab_size=407)
        return without_stop_tokens(folder), 407
    source = FILEROOT / "smollm2"
    if not (source / "config.json").is_file():
        subprocess.run([sys.executable, FETCH, source], check=True)
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
        else:
            (folder / file.name).symlink_to(file.resolve())
    return without_stop_tokens(folder), 49152


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M, on fewer loads")
    parser.add_argument("--quick", action="store_true", help="one load, two rounds, one thread")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, at least 5 for a figure")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    chosen = loads(is_large=options.smollm2, quick=options.quick)
    rounds = options.rounds or (2 if options.quick else 5)
    with tempfile.TemporaryDirectory() as scratch:
        folder, vocab_size = model(Path(scratch), is_large=options.smollm2)
        medians = {
            threads: measured(folder, chosen, rounds, threads, vocab_size)
            for threads in (options.threads[:1] if options.quick else options.threads)
        }
    rows = compared(chosen, medians)
    finish(f"{table(COLUMNS, map(cells, rows))}\n{NOTE}", rows, options.json)
    return rows


if __name__ == "__main__":
    main()
