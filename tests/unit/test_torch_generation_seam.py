"""Streaming, scoring and sleep of the embedded engine."""

import queue
import threading
import time

import numpy as np
import pytest
import torch

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.scoring import score
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.errors import EngineError
from tests.support.generation import (
    DEADLINE_S,
    forcing_weights,
    hf_logprobs,
    hf_model,
    random_prompt,
    request,
    serving,
)
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("m")
    kinds = {"lean": ("qwen3", 1), "hf": ("gpt2", 1), "other": ("qwen3", 2)}
    return {
        name: write_tiny_model(root / name, family, tie_word_embeddings=False, seed=seed)
        for name, (family, seed) in kinds.items()
    }


# -- streaming ------------------------------------------------------------------------------------


def streamed(folder, requests, **config):
    """Chunks by request, results, and what came in which order; of an engine that is closed."""
    events = queue.Queue()
    engine = TorchGenerationEngine(folder, TorchGenerationConfig(**config))
    engine.start(
        lambda results: events.put(("results", results)),
        lambda chunks: events.put(("chunks", chunks)),
    )
    chunks, results, order = {}, {}, []
    try:
        engine.submit(requests)
        while len(results) < len(requests):
            kind, some = events.get(timeout=DEADLINE_S)
            order.append((kind, [one.request_id for one in some]))
            for one in some:
                if kind == "chunks":
                    assert one.request_id not in results, "a chunk after the whole turn"
                    chunks.setdefault(one.request_id, []).append(one)
                else:
                    results[one.request_id] = one
    finally:
        engine.close()
    return chunks, results, order


def streaming(name, prompt, **fields):
    made = request(name, prompt, **fields)
    return type(made)(made.request_id, made.prompt_ids, made.sampling, made.seed, "", True)


def test_chunks_end_to_end_are_the_whole_turn_and_come_before_it(folders):
    sent = [
        streaming(f"s{i}", random_prompt(i, 5 + 40 * (i % 2)), seed=i, max_new_tokens=5 + 3 * i)
        for i in range(9)
    ]
    quiet = [request(f"q{i}", random_prompt(i, 9), seed=i, max_new_tokens=20) for i in range(4)]
    # Few slots and a small prefill: rows move, and long prompts enter in parts.
    chunks, results, order = streamed(
        folders["lean"], [*sent, *quiet], max_slots=4, max_prefill_tokens_per_step=16
    )
    assert set(chunks) == {one.request_id for one in sent}
    for name, some in chunks.items():
        for field in ("token_ids", "logprobs", "versions"):
            whole = getattr(results[name], field)
            np.testing.assert_array_equal(
                np.concatenate([getattr(chunk, field) for chunk in some]), whole
            )
            assert whole.dtype == getattr(some[0], field).dtype
        assert all(len(chunk.token_ids) for chunk in some)
        assert len(some) >= len(results[name].token_ids) - 1  # one a step; two in the first
    assert max(len(names) for kind, names in order if kind == "chunks") > 1
    for kind, names in order:
        assert len(names) == len(set(names)), "one chunk a turn and step"
        assert kind == "results" or set(names) <= set(chunks)


def test_a_streamed_turn_that_is_aborted_has_streamed_what_comes_back(folders):
    chunks, results = [], queue.Queue()
    engine = TorchGenerationEngine(folders["lean"], TorchGenerationConfig())
    engine.swap(forcing_weights(dict(engine.weight_shapes()), 100), 1, "keep")

    def on_chunks(some):
        chunks.extend(some)
        if len(chunks) == 10:
            engine.abort(["a"])

    engine.start(results.put, on_chunks)
    engine.submit([streaming("a", [5, 6], max_new_tokens=900)])
    (result,) = results.get(timeout=DEADLINE_S)
    engine.close()
    assert result.stop_reason is StopReason.ABORT
    assert len(result.token_ids) < 900
    sampled = np.concatenate([chunk.token_ids for chunk in chunks])
    np.testing.assert_array_equal(sampled, result.token_ids)


def test_nobody_gets_chunks_of_weights_that_are_not_finite(folders):
    tensors = {
        name: tensor * float("nan")
        for name, tensor in load_tensors(folders["lean"], load_config(folders["lean"])).items()
    }
    chunks, results = [], queue.Queue()
    engine = TorchGenerationEngine(folders["lean"], TorchGenerationConfig())
    engine.swap(tensors, 1, "keep")
    engine.start(results.put, chunks.extend)
    engine.submit([streaming("a", [5, 6]), request("b", [5, 6])])
    found = results.get(timeout=DEADLINE_S)
    engine.close()
    assert all("not finite" in result.error for result in found)
    assert not chunks


# -- scoring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_scores_are_the_logprobs_of_transformers_and_of_sampling(folders, kind):
    sent = request("a", random_prompt(0, 30), seed=3, max_new_tokens=40)
    with serving(folders[kind]) as served:
        (result,) = served.run([sent])
        ids = np.concatenate([sent.prompt_ids, result.token_ids])
        scores = served.engine.score(ids)
        served.engine.pause()
        np.testing.assert_array_equal(served.engine.score(ids), scores)
    assert scores.dtype == np.float32
    assert scores.shape == (len(ids) - 1,)
    np.testing.assert_allclose(scores[29:], result.logprobs, atol=1e-5)
    whole = request("w", ids[:1])
    rest = type(result)("w", ids[1:], scores, result.versions, result.stop_reason)
    expected, _ = hf_logprobs(hf_model(folders[kind]), whole, rest)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_a_long_text_is_scored_in_parts_alike(folders, kind):
    model = load_generation_model(folders[kind], TorchGenerationConfig())
    for length in (1, 2, 3, 15, 16, 33):
        ids = random_prompt(1, length)
        with torch.inference_mode():
            whole = score(model, ids)
            for part in (1, 8):
                np.testing.assert_allclose(score(model, ids, part), whole, atol=1e-5)
        assert whole.shape == (length - 1,)


def test_scoring_amid_sampling_disturbs_no_turn(folders):
    turns = [request(f"t{i}", random_prompt(i, 20), seed=i, max_new_tokens=60) for i in range(5)]
    with serving(folders["lean"]) as served:
        alone = served.run(turns)
    with serving(folders["lean"]) as served:
        served.engine.submit(turns)
        for i in range(10):
            served.engine.score(random_prompt(i, 50))
        mixed = served.wait(*(turn.request_id for turn in turns))
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "is empty"),
        ([5] * 1025, "has 1025 tokens, the context window 1024. Shorten"),
        ([5, 384], r"token ids are 5\.\.384"),
    ],
)
def test_ids_that_cannot_be_scored_are_refused(folders, ids, reason):
    with serving(folders["lean"]) as served:
        with pytest.raises(EngineError, match=f"score: .*{reason}"):
            served.engine.score(np.array(ids, np.int32))
        assert len(served.engine.score(np.full(1024, 5, np.int32))) == 1023


# -- sleep ----------------------------------------------------------------------------------------


def asleep_in_mid_turn(served, sent):
    probe = request("probe", [5], max_new_tokens=9)
    served.run_until("probe", [*sent, probe])
    served.engine.sleep()


@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_turns_kept_over_sleep_go_on_as_if_nothing_had_been(folders, kind):
    sent = [request(f"t{i}", random_prompt(i, 9 + i), seed=i, max_new_tokens=40) for i in range(6)]
    long = request("long", random_prompt(9, 90), seed=9, max_new_tokens=12)
    fields = {"max_slots": 8, "max_prefill_tokens_per_step": 32}
    with serving(folders[kind], **fields) as served:
        alone = served.run([*sent, long])
    with serving(folders[kind], **fields) as served:
        asleep_in_mid_turn(served, sent)
        assert served.engine._batch._cache._planes.numel() <= 4 * 2 * 2 * 32 * 8
        served.engine.submit([long, request("gone", [5], max_new_tokens=900)])
        served.engine.abort(["gone", "t3"])
        served.engine.wake()
        served.engine.resume()
        kept = served.wait(*(one.request_id for one in (*sent, long)))
        assert served.results["gone"].stop_reason is StopReason.ABORT
    for one, other in zip(alone, kept, strict=True):
        if one.request_id == "t3":
            assert other.stop_reason is StopReason.ABORT
            assert 0 < len(other.token_ids) < 40
            continue
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_weights_swapped_in_sleep_sample_all_that_follows(folders, policy):
    sent = request("a", random_prompt(0, 30), seed=3, max_new_tokens=60)
    with serving(folders["lean"]) as served:
        asleep_in_mid_turn(served, [sent])
        tensors = load_tensors(folders["other"], load_config(folders["other"]))
        served.engine.swap(tensors, 1, policy)
        ids = random_prompt(4, 20)
        score = served.engine.score(ids)
        served.engine.wake()
        np.testing.assert_allclose(served.engine.score(ids), score, atol=1e-6)
        served.engine.resume()
        (result,) = served.wait("a")
    new = result.versions == 1
    assert 0 < new.sum() < len(new)
    expected, _ = hf_logprobs(hf_model(folders["other"]), sent, result)
    np.testing.assert_allclose(result.logprobs[new], expected[new], atol=1e-4)


def test_what_a_sleeping_or_waking_engine_cannot_do_is_refused_and_breaks_nothing(folders):
    tensors = load_tensors(folders["other"], load_config(folders["other"]))
    sent = request("a", random_prompt(0, 30), max_new_tokens=60)
    with serving(folders["lean"]) as served:
        with pytest.raises(EngineError, match="call pause first"):
            served.engine.sleep()
        asleep_in_mid_turn(served, [sent])
        with pytest.raises(EngineError, match="it sleeps; call wake before resume"):
            served.engine.resume()
        with pytest.raises(EngineError, match="1 turns are under way and cannot end"):
            served.engine.swap(tensors, 1, "drain")
        assert served.engine.health().version == 0
        served.engine.wake()
        served.engine.resume()
        (result,) = served.wait("a")
        assert set(result.versions.tolist()) == {0}
        served.engine.pause()
        served.engine.sleep()
        served.engine.swap(tensors, 1, "drain")  # nothing is under way
        served.engine.wake()
        served.engine.resume()
        (after,) = served.run([request("b", [5, 6], max_new_tokens=3)])
        assert set(after.versions.tolist()) == {1}


def test_a_paused_and_a_sleeping_engine_with_turns_use_no_processor_time(folders):
    with serving(folders["lean"]) as served:
        served.run_until(
            "probe",
            [
                request("probe", [5], max_new_tokens=3),
                *(request(f"t{i}", [5, 6 + i], max_new_tokens=500) for i in range(4)),
            ],
        )
        for verb in (served.engine.pause, served.engine.sleep):
            verb()
            before = time.process_time()
            threading.Event().wait(0.5)
            assert time.process_time() - before < 0.005


def test_close_ends_a_sleeping_engine_and_who_waits_for_it(folders):
    with serving(folders["lean"]) as served:
        asleep_in_mid_turn(served, [request("a", [5, 6], max_new_tokens=500)])
        served.engine.close()
        (result,) = served.wait("a")
        assert result.stop_reason is StopReason.ABORT
        for verb in (served.engine.sleep, served.engine.wake):
            with pytest.raises(EngineError, match="it is closed"):
                verb()
