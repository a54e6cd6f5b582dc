"""vLLM is held to what every generation engine must do, and to what only it can do wrong."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_ray.engines.protocols import GenerationEngine
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.errors import EngineDied, EngineError
from tests.support.conformance import (
    Bench,
    Capacity,
    EngineConformance,
    Subject,
    prompt_of,
    tensors_of,
    trainer_logprobs,
)
from tests.support.generation import hf_model
from tests.support.needs import needs_vllm
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_process import engine_process_below

pytestmark = needs_vllm


def _made(folder: Path, capacity: Capacity) -> GenerationEngine:
    from areal_ray.engines.vllm_generation import VllmGenerationEngine

    config = VllmGenerationConfig(
        max_context_tokens=capacity.max_context_tokens,
        max_slots=capacity.max_running,
        dtype=capacity.dtype,
        kv_cache_bytes=64 * 2**20,
    )
    return VllmGenerationEngine(folder, config)


@pytest.mark.extended
def test_a_tied_head_follows_the_embedding_that_is_swapped_in(tmp_path: Path) -> None:
    # A vocabulary that vLLM pads. The conformance suite's heads are not tied.
    folder = write_tiny_model(tmp_path / "a", seed=1, vocab_size=407)
    other = write_tiny_model(tmp_path / "b", seed=2, vocab_size=407)
    engine = _made(folder, Capacity(max_context_tokens=128))
    try:
        assert "lm_head.weight" not in engine.weight_shapes()
        engine.swap(tensors_of(other), 1, "keep")
        ids = prompt_of(1, 20)
        told = engine.score(ids)
    finally:
        engine.close()
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        table = hf_model(other)(tokens).logits[0, :-1].log_softmax(-1)
    expected = table.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(told, expected, atol=1e-4)


def test_likeliest_tokens_are_those_whether_or_not_vllm_joins_what_it_told() -> None:
    from vllm.logprobs import FlatLogprobs

    from areal_ray.engines.vllm_turns import top_tokens

    def told(sampled: int, rank: int) -> FlatLogprobs:
        logprobs = {7: -0.5, 8: -1.0, 9: -2.0, 5: -3.0}
        flat, ids = FlatLogprobs(), [sampled, 7, 8, 9]
        flat.append_fast(ids, [logprobs[i] for i in ids], iter([rank, 1, 2, 3]), [None] * 4)
        return flat

    joined = told(8, 2)
    for later in (told(7, 1), told(5, 4), told(9, 3)):
        joined.extend(later)
    assert len(joined.token_ids) == 4 + 3 + 4 + 3  # one that is among them is there once
    for flat, positions in ((told(8, 2), 1), (joined, 4)):
        top = top_tokens(flat, 3)
        np.testing.assert_array_equal(top.token_ids, [[7, 8, 9]] * positions)
        np.testing.assert_array_equal(top.logprobs, [[-0.5, -1.0, -2.0]] * positions)


class TestVllm(EngineConformance):
    subject = Subject(
        "vllm",
        _made,
        lacks={
            "half_precision_is_near_and_reported": "one more start of vLLM; see tests/gpu",
            "close_hands_back_what_is_unfinished_and_takes_no_more": "the last test here does it",
        },
    )

    def test_a_prefix_is_shared_within_a_version_and_never_over_a_swap(self, bench: Bench) -> None:
        prompt = prompt_of(3, 200)  # several blocks
        turns = [bench.ask(prompt, seed=i, max_new_tokens=5) for i in range(3)]
        bench.run(turns[:1])
        running = bench.begun([bench.ask(prompt_of(4, 9), max_new_tokens=400)])
        bench.publish(tensors_of(bench.other), "keep")  # while something runs: vLLM keeps its cache
        try:
            results = bench.run(turns[1:])
        finally:
            bench.restore()
            bench.engine.abort([running[0].request_id])
        expected = trainer_logprobs(bench.other, turns[1:], results)
        for result, logprobs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)

    def test_a_turn_that_waits_for_a_slot_during_a_swap_is_wholly_of_the_new_weights(
        self, bench: Bench
    ) -> None:
        turns = [bench.ask(prompt_of(i, 70), seed=i, max_new_tokens=60) for i in range(60)]
        bench.run(turns[:1])  # its blocks are cached under the old version
        again = [bench.ask(prompt_of(0, 70), seed=9, max_new_tokens=20) for _ in range(2)]
        bench.engine.submit([*turns[1:], *again])
        new = bench.publish(tensors_of(bench.other), "keep")
        try:
            results = bench.results([*turns[1:], *again])
        finally:
            bench.restore()
        whole = [
            (turn, result)
            for turn, result in zip([*turns[1:], *again], results, strict=True)
            if (result.versions == new).all()
        ]
        assert len(whole) >= 20
        expected = trainer_logprobs(bench.other, *map(list, zip(*whole, strict=True)))
        for (_, result), logprobs in zip(whole, expected, strict=True):
            np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)

    def test_more_prompt_tokens_than_a_step_takes_wait_for_the_next(self, bench: Bench) -> None:
        turns = [bench.ask(prompt_of(i, 300), seed=i, max_new_tokens=3) for i in range(30)]
        results = bench.run(turns)
        expected = trainer_logprobs(bench.folder, turns, results)
        for result, logprobs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)

    def test_penalties_and_biases_change_the_draw_and_not_the_logprob_told(
        self, bench: Bench
    ) -> None:
        ways = [
            {"logit_bias": {"100": 100.0}},
            {"repetition_penalty": 1.5},
            {"presence_penalty": 2},
        ]
        turns = [
            bench.ask(prompt_of(i, 12), seed=i, temperature=0.8, max_new_tokens=12, **way)
            for i, way in enumerate(ways)
        ]
        results = bench.run(turns)
        assert results[0].token_ids.tolist() == [100] * 12
        expected = trainer_logprobs(bench.folder, turns, results)
        for result, logprobs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)

    def test_weights_that_give_no_numbers_fail_the_turn_and_name_the_version(
        self, bench: Bench
    ) -> None:
        broken = tensors_of(bench.folder)
        broken["model.norm.weight"] = broken["model.norm.weight"] * float("nan")
        version = bench.publish(broken, "keep")
        turns = [bench.ask([5, 6], max_new_tokens=3, streamed=i == 0) for i in range(2)]
        bench.engine.submit(turns)
        results = bench.served.wait(*(turn.request_id for turn in turns))
        bench.restore()
        for turn, result in zip(turns, results, strict=True):
            assert turn.request_id in result.error
            assert f"version {version} of the weights" in result.error
        assert turns[0].request_id not in bench.served.chunks

    def test_an_update_that_fails_before_it_is_loaded_leaves_the_engine_as_it_was(
        self, bench: Bench
    ) -> None:
        with pytest.raises(EngineError, match=r"lm_head\.weight"):
            bench.engine.swap({}, bench.version + 1, "keep")
        (result,) = bench.run([bench.ask([5, 6], max_new_tokens=3)])
        assert set(result.versions.tolist()) == {bench.version}

    def test_what_vllm_was_told_by_variables_does_not_stay_behind(self, bench: Bench) -> None:
        assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
        assert "TORCHDYNAMO_DISABLE" not in os.environ

    def test_the_death_of_vllms_process_is_told_by_every_turn_and_by_health(
        self, bench: Bench
    ) -> None:
        (turn,) = bench.begun([bench.ask([5, 6], max_new_tokens=450)])
        bench.engine.pause()
        os.kill(engine_process_below(os.getpid()), signal.SIGKILL)
        (result,) = bench.served.wait(turn.request_id)
        assert turn.request_id in result.error
        told = _failure_told(bench.engine)
        assert "process died: EngineCore (process " in told
        assert "ended with code -9 (SIGKILL)" in told
        for verb in (
            bench.engine.resume,
            lambda: bench.engine.swap(tensors_of(bench.folder), 99, "keep"),
            lambda: bench.engine.submit([bench.ask([5])]),
            lambda: bench.engine.score(np.array([5, 6], np.int32)),
        ):
            with pytest.raises(EngineDied, match="process died"):
                verb()
        bench.engine.close()


def _failure_told(engine: GenerationEngine) -> str:
    """What `health` raises, within some seconds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            engine.health()
        except EngineError as error:
            return str(error)
        time.sleep(0.05)
    return ""
