"""One side of `benchmarks.engines`, in a process of its own: python -m benchmarks.engine_sides ...

    python -m benchmarks.engine_sides SIDE MODEL_FOLDER THREADS

Reads a load as a JSON line (prompts and lengths), samples it, and answers with a JSON line: seconds
by the wall and by the processors, tokens, and the sum of the log-probs. Every side samples at
temperature 1 from the whole vocabulary, ignores the end of a turn, computes in float32 and gives
the log-prob of each sampled token. It starts once and stays warm, as a rollout does.
"""

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Prompts = Sequence[list[int]]
Side = Callable[[Prompts, Sequence[int]], list[list[float]]]
"""Prompts and lengths -> log-probs of the tokens of each."""


def embedded(folder: Path, threads: int) -> Side:
    """The embedded engine, driven as a rollout actor drives it."""
    import numpy as np

    from areal_ray.engines.protocols import GenerationRequest, GenerationResult, SamplingConfig
    from areal_ray.engines.torch_generation import TorchGenerationEngine
    from areal_ray.engines.torch_generation_config import TorchGenerationConfig

    engine = TorchGenerationEngine(folder, TorchGenerationConfig(num_threads=threads))
    steps: queue.Queue[list[GenerationResult]] = queue.Queue()
    engine.start(steps.put)
    asked = 0

    def sample(prompts: Prompts, lengths: Sequence[int]) -> list[list[float]]:
        nonlocal asked
        asked += 1
        turns = [
            GenerationRequest(
                request_id=f"{asked}-{i}",
                prompt_ids=np.array(prompt, np.int32),
                sampling=SamplingConfig(max_new_tokens=length),
                seed=asked * 1000 + i,
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        engine.submit(turns)
        found: list[list[float]] = []
        while len(found) < len(turns):
            found += [result.logprobs.tolist() for result in steps.get(timeout=600)]
        return found

    return sample


def generate(folder: Path, threads: int) -> Side:
    """`generate` of Transformers on the whole batch, padded on the left, to the longest turn."""
    import torch

    model = _model(folder, threads)

    def sample(prompts: Prompts, lengths: Sequence[int]) -> list[list[float]]:
        longest, num_new = max(map(len, prompts)), max(lengths)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=num_new, min_new_tokens=num_new, output_logits=True,
                return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
            sampled = output.sequences[:, longest:]
            # Step by step: all logits of a large vocabulary at once would not fit.
            steps = zip(output.logits, sampled.T, strict=True)
            told = [torch.log_softmax(x, -1).gather(1, t[:, None])[:, 0] for x, t in steps]
        table = torch.stack(told, 1).tolist()
        return [row[:length] for row, length in zip(table, lengths, strict=True)]

    return sample


def continuous(folder: Path, threads: int) -> Side:
    """Continuous batching of Transformers: its manager, started once."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    manager = _model(folder, threads).init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=512, eos_token_id=-1
        ),
        # Its own defaults size the cache by a GPU's memory.
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=2048, max_batch_tokens=4096, return_logprobs=True
        ),
    )
    manager.start()

    def sample(prompts: Prompts, lengths: Sequence[int]) -> list[list[float]]:
        names = [
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        found: dict[str, list[float]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching ended: {result and result.error}")
            if result.is_finished():
                found[result.request_id] = list(result.logprobs)
        return [found[name] for name in names]

    return sample


def vllm(folder: Path, threads: int) -> Side:
    """vLLM's build for the CPU, offline and in one process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=1024, max_num_seqs=64, disable_log_stats=True,
        distributed_executor_backend="uni", seed=0,
    )  # fmt: skip

    def sample(prompts: Prompts, lengths: Sequence[int]) -> list[list[float]]:
        wanted = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0,
                           detokenize=False)
            for n in lengths
        ]  # fmt: skip
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        turns = [output.outputs[0] for output in llm.generate(asked, wanted, use_tqdm=False)]
        return [
            [told[token].logprob for told, token in zip(turn.logprobs, turn.token_ids, strict=True)]
            for turn in turns
        ]

    return sample


SIDES: dict[str, Callable[[Path, int], Side]] = {
    "embedded": embedded,
    "generate": generate,
    "continuous": continuous,
    "vllm": vllm,
}


def _model(folder: Path, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def main(name: str, folder: str, threads: str) -> None:
    """Serve loads until stdin ends; only answers are written to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sample = SIDES[name](Path(folder), int(threads))
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        load = json.loads(line)
        began, began_cpu = time.perf_counter(), time.process_time()
        logprobs = sample(load["prompts"], load["lengths"])
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        told = {
            "wall_s": seconds,
            "cpu_s": cpu,
            "tokens": sum(map(len, logprobs)),
            "logprob": sum(map(sum, logprobs)),
        }
        answers.write(json.dumps(told) + "\n")
        answers.flush()
    os._exit(0)  # some sides' threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
