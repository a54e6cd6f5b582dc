"""Sampling speed of the embedded torch engine against Hugging Face `generate`, side by side.

    python -m benchmarks.sampling [--quick] [--model FOLDER] [--json FILE]

Both sides run in this process, one after the other within each round, on the same random prompts,
at temperature 1, ignoring end of turn, and both give the log-prob of every sampled token. Each
side is measured with one thread and then with two and is given the better of the two. A ratio is
that of the medians over the rounds; on a machine that does other work too, trust the last column.
`generate` samples a batch until its longest turn ends; tokens beyond a turn's own length are not
counted for either side.
"""

import argparse
import json
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from areal_ray.engines.protocols import GenerationRequest, GenerationResult, SamplingConfig
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from benchmarks.common import table
from tests.support.tiny_models import write_tiny_model


@dataclass(frozen=True)
class Load:
    """A batch of prompts with the number of tokens each turn samples."""

    name: str
    prompts: list[np.ndarray]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return sum(self.lengths)


def loads(vocab_size: int, quick: bool) -> list[Load]:
    """What the two sides are compared on."""
    random = np.random.default_rng(0)

    def prompts(count: int, low: int, high: int, copies: int = 1) -> list[np.ndarray]:
        made = [
            random.integers(3, vocab_size, random.integers(low, high)).astype(np.int32)
            for _ in range(count // copies)
        ]
        return [prompt for prompt in made for _ in range(copies)]

    def uniform(count: int) -> list[int]:
        return random.integers(8, 65, count).tolist()

    made = []
    for count in (64, 16):
        made.append(Load(f"{count} turns of 32", prompts(count, 18, 34), [32] * count))
        made.append(Load(f"{count} turns of 8..64", prompts(count, 18, 34), uniform(count)))
        shared = prompts(count, 128, 129, copies=8)
        made.append(Load(f"{count} turns of 32, 8 to a prompt of 128", shared, [32] * count))
        made.append(Load(f"{count} turns of 8..64, 8 to a prompt of 128", shared, uniform(count)))
    return made[:2] if quick else made


class Engine:
    """The embedded engine, as a rollout actor drives it."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        config = TorchGenerationConfig(num_threads=num_threads)
        self._engine = TorchGenerationEngine(folder, config)
        self._steps: queue.Queue[list[GenerationResult]] = queue.Queue()
        self._engine.start(self._steps.put)
        self._round = 0

    def __call__(self, load: Load) -> None:
        """Sample a load to its end."""
        self._round += 1
        self._engine.submit(
            [
                GenerationRequest(
                    request_id=f"{self._round}-{i}",
                    prompt_ids=prompt,
                    sampling=SamplingConfig(max_new_tokens=length),
                    seed=self._round * 1000 + i,
                )
                for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
            ]
        )
        done = tokens = 0
        while done < len(load.prompts):
            for result in self._steps.get(timeout=600):
                done += 1
                tokens += len(result.token_ids)
        assert tokens == load.num_tokens, f"{tokens} tokens sampled of {load.num_tokens}"

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()


class Generate:
    """`generate` of Transformers on the whole batch, padded on the left."""

    def __init__(self, model: Any, num_threads: int) -> None:
        self._model = model
        self._num_threads = num_threads

    def __call__(self, load: Load) -> None:
        """Sample a load to its end, with the log-prob of each token."""
        torch.set_num_threads(self._num_threads)
        longest = max(map(len, load.prompts))
        ids = torch.zeros(len(load.prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(load.prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, longest - len(prompt) :] = 1
        num_new = max(load.lengths)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
            logprobs = torch.log_softmax(torch.stack(output.logits, 1), -1)
            logprobs.gather(2, output.sequences[:, longest:, None])


def without_stop_tokens(folder: Path) -> Path:
    """Remove every end-of-turn id from a model folder, so that lengths are ours to choose."""
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        fields.pop("eos_token_id", None)
        fields.pop("eos_token", None)
        (folder / name).write_text(json.dumps(fields))
    return folder


@dataclass(frozen=True)
class Seconds:
    """Medians over the rounds of one side on one load."""

    wall: float
    cpu: float


def measure(
    sides: dict[str, Callable[[Load], None]], load: Load, rounds: int
) -> dict[str, Seconds]:
    """Every side on a load, interleaved; the first round only warms up."""
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            side(load)
            if turn:
                wall[name].append(time.perf_counter() - begin)
                cpu[name].append(time.process_time() - begin_cpu)
    median = statistics.median
    return {name: Seconds(median(wall[name]), median(cpu[name])) for name in sides}


def compare(
    folder: Path, rounds: int, quick: bool, threads_tried: Sequence[int]
) -> list[dict[str, Any]]:
    """One row for each load: tokens per second and threads of both sides, and their ratio."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tried = loads(model.config.vocab_size, quick)
    medians: dict[tuple[str, str, int], Seconds] = {}
    for threads in threads_tried:  # apart: idle OpenMP threads spin and would slow what follows
        engine = Engine(folder, threads)
        for load in tried:
            pair = {"engine": engine, "generate": Generate(model, threads)}
            for side, seconds in measure(pair, load, rounds).items():
                medians[load.name, side, threads] = seconds
        engine.close()
    rows = []
    for load in tried:
        row: dict[str, Any] = {"load": load.name, "tokens": load.num_tokens}
        for side in ("engine", "generate"):
            wall = {n: medians[load.name, side, n].wall for n in threads_tried}
            best = min(wall, key=wall.__getitem__)
            row[f"{side}_tokens_per_s"] = load.num_tokens / wall[best]
            row[f"{side}_threads"] = best
        ours, theirs = (medians[load.name, side, 1] for side in ("engine", "generate"))
        row["ratio"] = row["engine_tokens_per_s"] / row["generate_tokens_per_s"]
        row["ratio_one_thread"] = theirs.wall / ours.wall
        row["ratio_one_thread_cpu"] = theirs.cpu / ours.cpu
        rows.append(row)
    return rows


COLUMNS = (
    ("load", 40), ("engine tok/s", 14), ("generate tok/s", 16), ("ratio", 7), ("1 thread", 9),
    ("1 thread, CPU", 14),
)  # fmt: skip
NOTE = "(threads in brackets; '1 thread' = both sides with one, by wall and by CPU time)"


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        row["load"],
        f"{row['engine_tokens_per_s']:,.0f} ({row['engine_threads']})",
        f"{row['generate_tokens_per_s']:,.0f} ({row['generate_threads']})",
        f"{row['ratio']:.2f}x",
        f"{row['ratio_one_thread']:.2f}x",
        f"{row['ratio_one_thread_cpu']:.2f}x",
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two loads, three rounds")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, at least 5")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="1 is required")
    parser.add_argument("--model", type=Path, help="a model folder instead of the demo's size")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        if options.model:
            folder.mkdir()
            for file in options.model.iterdir():
                if file.suffix == ".json":
                    (folder / file.name).write_bytes(file.read_bytes())
                else:
                    (folder / file.name).symlink_to(file.resolve())
        else:
            write_tiny_model(folder, "qwen3", vocab_size=407)
        rounds = 3 if options.quick else options.rounds
        rows = compare(without_stop_tokens(folder), rounds, options.quick, options.threads)
    print(table(COLUMNS, map(cells, rows)))
    print(NOTE)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
