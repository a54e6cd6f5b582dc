"""The engine's promises to those who submit turns and publish weights."""

import re
import threading
import time
from collections import deque

import numpy as np
import pytest
import torch

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.running_batch import RunningBatch
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.errors import DataError, EngineError
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

END_OF_TURN = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("m") / "a", tie_word_embeddings=False, seed=1)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("m") / "b", tie_word_embeddings=False, seed=2)


def never_stop(engine):
    """Weights under which every turn runs to its limit."""
    engine.swap(forcing_weights(dict(engine.weight_shapes()), 100), 1, "keep")


def tensors_of(folder):
    return load_tensors(folder, load_config(folder))


# -- limits and errors ----------------------------------------------------------------------------


def test_a_turn_ends_at_its_limit_with_reason_length(folder):
    with serving(folder) as served:
        (result,) = served.run([request("a", random_prompt(0, 9), max_new_tokens=7)])
    assert result.stop_reason is StopReason.LENGTH
    assert len(result.token_ids) == len(result.logprobs) == len(result.versions) == 7


def test_a_turn_ends_with_its_stop_token_which_is_part_of_the_result(folder):
    with serving(folder) as served:
        (free,) = served.run([request("a", random_prompt(0, 9), max_new_tokens=40)])
        tokens = free.token_ids.tolist()
        absent = next(token for token in range(3, 384) if token not in tokens)
        stops = (absent, tokens[6])
        (result,) = served.run(
            [request("b", random_prompt(0, 9), max_new_tokens=40, stop_token_ids=stops)]
        )
    assert result.stop_reason is StopReason.STOP
    np.testing.assert_array_equal(result.token_ids, free.token_ids[: tokens.index(tokens[6]) + 1])


def test_the_tokenizers_end_of_turn_token_always_stops(folder):
    with serving(folder) as served:
        shapes = dict(served.engine.weight_shapes())
        served.engine.swap(forcing_weights(shapes, END_OF_TURN), 1, "keep")
        (result,) = served.run([request("a", [5, 6, 7], max_new_tokens=30)])
    assert result.token_ids.tolist() == [END_OF_TURN]
    assert result.stop_reason is StopReason.STOP


def test_the_context_window_shortens_a_turn_and_is_reported_as_length(folder):
    with serving(folder, max_context_tokens=20) as served:
        (result,) = served.run([request("a", random_prompt(0, 15), max_new_tokens=64)])
    assert len(result.token_ids) == 5
    assert result.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "the prompt is empty"),
        ([1] * 20, "the prompt has 20 tokens, the context window 20"),
        ([5, 384], r"token ids are 5\.\.384, must be in 0\.\.383"),
        ([-1, 5], r"token ids are -1\.\.5"),
    ],
)
def test_a_bad_request_comes_back_naming_itself_and_the_others_go_on(folder, prompt, reason):
    with serving(folder, max_context_tokens=20) as served:
        bad, good = served.run([request("bad-7", prompt), request("good", [5, 6])])
    assert bad.error.startswith("request bad-7: ")
    assert re.search(reason, bad.error)
    assert len(bad.token_ids) == 0
    assert not good.error


def test_a_window_beyond_the_models_is_refused(folder):
    with pytest.raises(EngineError, match="max_context_tokens: is 4096, the model allows 1024"):
        TorchGenerationEngine(folder, TorchGenerationConfig(max_context_tokens=4096))


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no config"):
        TorchGenerationEngine(tmp_path, TorchGenerationConfig())


# -- batching -------------------------------------------------------------------------------------


def test_the_same_seed_and_prompt_give_the_same_tokens_whatever_else_is_in_the_batch(folder):
    watched = [request(f"w{i}", random_prompt(i, 20), seed=i, max_new_tokens=30) for i in range(3)]
    noise = [
        request(f"n{i}", random_prompt(90 + i, 5 + i), seed=i, max_new_tokens=3 + 2 * i)
        for i in range(20)
    ]
    with serving(folder) as served:
        alone = [served.run([one])[0] for one in watched]
    with serving(folder, max_slots=7) as served:
        mixed = served.run([*noise[:10], *watched, *noise[10:]])[10:13]
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_siblings_with_different_seeds_differ_and_prefill_their_prompt_once(folder):
    batch = _batch(folder)
    group = [request(f"s{i}", random_prompt(0, 50), seed=i, max_new_tokens=20) for i in range(8)]
    with torch.inference_mode():
        results = _drive(batch, group)
    assert len({tuple(result.token_ids) for result in results}) == 8
    assert batch.prefilled_tokens == 50


def test_a_next_turn_prefills_only_what_is_new(folder):
    batch = _batch(folder)
    first = request("t1", random_prompt(0, 50), key="episode", max_new_tokens=20)
    with torch.inference_mode():
        (turn,) = _drive(batch, [first])
        prompt = np.concatenate([first.prompt_ids, turn.token_ids, random_prompt(1, 9)])
        before = batch.prefilled_tokens
        _drive(batch, [request("t2", prompt, key="episode")])
        # The last sampled token was never fed back, so it counts as new.
        assert batch.prefilled_tokens - before == 9 + 1
        batch.change_weights(
            batch_weights(folder), 1, recompute=False
        )  # what was kept is of version 0
        before = batch.prefilled_tokens
        _drive(batch, [request("t3", prompt, key="episode")])
        assert batch.prefilled_tokens - before == len(prompt)


def batch_weights(folder):
    forward = load_generation_model(folder, TorchGenerationConfig()).forward
    return forward.prepare(tensors_of(folder))


def _batch(folder, **fields):
    config = TorchGenerationConfig(max_slots=16, **fields)
    return RunningBatch(load_generation_model(folder, config), config)


def _drive(batch, requests):
    """Run a batch until all requests ended; results in the order of the requests."""
    waiting, results = deque(requests), {}
    while waiting or batch.num_rows:
        for result in [*batch.admit(batch.take(waiting)), *batch.decode()]:
            results[result.request_id] = result
    return [results[one.request_id] for one in requests]


def test_a_small_cache_limits_how_many_turns_run_at_once_but_serves_all(folder):
    # Tokens, keys and values, layers, heads, head size, bytes of a float32: 4 MiB.
    row_bytes = 1024 * 2 * 2 * 2 * 32 * 4
    batch = _batch(folder, kv_cache_bytes=3 * row_bytes)
    requests = [request(f"r{i}", random_prompt(i, 32), max_new_tokens=992) for i in range(10)]
    waiting, most, ended = deque(requests), 0, []
    with torch.inference_mode():
        while waiting or batch.num_rows:
            ended += batch.admit(batch.take(waiting))
            most = max(most, batch.num_rows)
            ended += batch.decode()
    assert most == 3
    assert sorted(result.request_id for result in ended) == [f"r{i}" for i in range(10)]


def test_turns_that_end_in_one_step_come_back_in_one_call(folder):
    with serving(folder) as served:
        served.engine.pause()
        served.engine.submit(
            [request(f"r{i}", random_prompt(i, 5), max_new_tokens=1) for i in range(12)]
        )
        served.engine.resume()
        assert len(served.steps.get(timeout=DEADLINE_S)) == 12


# -- pause, abort, close --------------------------------------------------------------------------


def test_aborted_turns_come_back_with_what_was_sampled(folder):
    with serving(folder, max_slots=2) as served:
        never_stop(served.engine)
        long = [request(f"r{i}", random_prompt(i, 5), max_new_tokens=900) for i in range(3)]
        probe = request("probe", [5], max_new_tokens=1)
        served.run_until("probe", [long[0], probe, *long[1:]])
        served.engine.abort(["r0", "r2", "unknown"])
        served.engine.resume()
        running, waiting = served.wait("r0", "r2")
        served.engine.abort(["r1"])
        served.wait("r1")
    assert running.stop_reason is waiting.stop_reason is StopReason.ABORT
    assert not running.error
    assert 1 <= len(running.token_ids) < 900
    assert len(waiting.token_ids) == 0


def test_nothing_is_sampled_while_paused_and_requests_stay(folder):
    with serving(folder) as served:
        never_stop(served.engine)
        served.engine.submit([request("a", [5, 6], max_new_tokens=500)])
        served.engine.pause()
        before = served.engine.health()
        threading.Event().wait(0.05)
        after = served.engine.health()
        assert after.sampled_tokens == before.sampled_tokens
        assert after.num_running + after.num_waiting == 1
        served.engine.resume()
        served.wait("a")


def test_close_is_quick_and_hands_back_unfinished_turns_as_aborted(folder):
    with serving(folder, max_slots=1) as served:
        never_stop(served.engine)
        served.engine.submit(
            [request(f"r{i}", random_prompt(i, 5), max_new_tokens=900) for i in range(3)]
        )
        begin = time.perf_counter()
        served.engine.close()
        assert time.perf_counter() - begin < 1.0
        results = served.wait("r0", "r1", "r2")
        assert {result.stop_reason for result in results} == {StopReason.ABORT}
        with pytest.raises(EngineError, match="it is closed"):
            served.engine.submit([request("late", [5])])


def test_an_idle_engine_uses_no_processor_time(folder):
    with serving(folder) as served:
        served.run([request("a", [5, 6], max_new_tokens=3)])
        before = time.process_time()
        threading.Event().wait(0.3)
        assert time.process_time() - before < 0.1


def test_a_failure_in_the_loop_is_reported_to_everyone_and_ends_the_engine(folder):
    results, failed = {}, threading.Event()

    def on_results(step):
        results.update({result.request_id: result for result in step})
        if "probe" in results and not failed.is_set():
            failed.set()
            raise ValueError("the receiver broke")

    engine = TorchGenerationEngine(folder, TorchGenerationConfig(max_slots=2))
    engine.start(on_results)
    never_stop(engine)
    engine.submit(
        [
            request("running", [5, 6], max_new_tokens=900),
            request("probe", [5], max_new_tokens=1),
            *[request(f"waiting{i}", [7], max_new_tokens=900) for i in range(2)],
        ]
    )
    assert failed.wait(DEADLINE_S)
    engine.close()
    for name in ("running", "waiting0", "waiting1"):
        assert "the engine stopped: ValueError: the receiver broke" in results[name].error
        assert name in results[name].error
    with pytest.raises(EngineError, match="the receiver broke"):
        engine.health()
    with pytest.raises(EngineError, match="the receiver broke"):
        engine.submit([request("late", [5])])
    with pytest.raises(EngineError, match="the receiver broke"):
        engine.swap(tensors_of(folder), 1, "keep")


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "recompute", "drain"])
def test_no_token_carries_the_version_of_weights_that_did_not_sample_it(folder, policy):
    with serving(folder, version=4, max_slots=8) as served:
        engine = served.engine
        shapes = dict(engine.weight_shapes())
        engine.swap(forcing_weights(shapes, 100), 5, "keep")
        turns = [request(f"r{i}", random_prompt(i, 6 + i), max_new_tokens=60) for i in range(6)]
        served.run_until("probe", [*turns, request("probe", [5], max_new_tokens=9)])
        idle_s = engine.swap(forcing_weights(shapes, 200), 6, policy)
        engine.resume()
        served.engine.submit([request("after", [5], max_new_tokens=3)])
        results = served.wait(*[f"r{i}" for i in range(6)])
        (after,) = served.wait("after")
        assert engine.health().version == 6
        assert engine.health().idle_for_swap_s >= idle_s > 0.0
    for result in results:
        assert len(result.token_ids) == 60
        sampled_by = {5: 100, 6: 200}
        expected = [sampled_by[version] for version in result.versions.tolist()]
        assert result.token_ids.tolist() == expected
        assert (np.diff(result.versions) >= 0).all()
        assert set(result.versions.tolist()) == ({5} if policy == "drain" else {5, 6})
    assert after.token_ids.tolist() == [200] * 3
    assert after.versions.tolist() == [6] * 3


def test_turns_that_wait_when_a_drain_begins_are_sampled_by_the_new_weights(folder):
    with serving(folder, max_slots=2) as served:
        engine = served.engine
        shapes = dict(engine.weight_shapes())
        engine.swap(forcing_weights(shapes, 100), 1, "keep")
        limits = {"probe": 3, "old": 20, "new": 5}
        turns = [request(name, [5], max_new_tokens=limit) for name, limit in limits.items()]
        served.run_until("probe", turns)
        engine.swap(forcing_weights(shapes, 200), 2, "drain")  # goes on though paused
        engine.resume()
        old, new = served.wait("old", "new")
    assert old.token_ids.tolist() == [100] * 20
    assert old.versions.tolist() == [1] * 20
    assert new.token_ids.tolist() == [200] * 5
    assert new.versions.tolist() == [2] * 5


def test_after_recompute_a_running_turn_samples_exactly_from_the_new_weights(folder, other_folder):
    distance = {}
    for policy in ("keep", "recompute"):
        with serving(folder) as served:
            sent = request("a", random_prompt(0, 30), seed=3, max_new_tokens=60)
            served.run_until("probe", [sent, request("probe", [5], max_new_tokens=5)])
            served.engine.swap(tensors_of(other_folder), 1, policy)
            served.engine.resume()
            (result,) = served.wait("a")
        new = result.versions == 1
        assert 0 < new.sum() < len(new)
        logprobs, _ = hf_logprobs(hf_model(other_folder), sent, result)
        distance[policy] = np.abs(result.logprobs - logprobs)[new].max()
    assert distance["recompute"] < 1e-4
    assert distance["keep"] > 1e-3


def test_swapped_weights_are_copied_so_the_caller_may_reuse_its_buffers(folder, other_folder):
    with serving(folder) as served:
        tensors = tensors_of(other_folder)
        served.engine.swap(tensors, 1, "keep")
        for tensor in tensors.values():
            tensor.fill_(7.0)
        sent = request("a", random_prompt(0, 9), max_new_tokens=9)
        (result,) = served.run([sent])
    logprobs, _ = hf_logprobs(hf_model(other_folder), sent, result)
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("forward", ["lean", "hf"])
def test_swap_names_what_is_missing_extra_or_misshapen_and_changes_nothing(folder, forward):
    with serving(folder, forward=forward) as served:
        tensors = tensors_of(folder)
        tensors["lm_head.bias"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:5]
        with pytest.raises(EngineError) as caught:
            served.engine.swap(tensors, 1, "keep")
        assert "missing: model.norm.weight" in str(caught.value)
        assert "not in the model: lm_head.bias" in str(caught.value)
        assert "lm_head.weight is (5, 64) and must be (384, 64)" in str(caught.value)
        assert served.engine.health().version == 0


def test_the_fallback_forward_swaps_too(folder, other_folder):
    with serving(folder, forward="hf") as served:
        served.engine.swap(tensors_of(other_folder), 1, "recompute")
        sent = request("a", random_prompt(0, 9), max_new_tokens=9)
        (result,) = served.run([sent])
    logprobs, _ = hf_logprobs(hf_model(other_folder), sent, result)
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)


def test_weights_that_are_not_finite_give_errors_and_good_ones_heal_the_engine(folder):
    with serving(folder) as served:
        tensors = tensors_of(folder)
        broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
        served.engine.swap(broken, 1, "keep")
        requests = [request(f"bad{i}", random_prompt(i, 9)) for i in range(3)]
        for result in served.run(requests):
            assert "version 1 of the weights gave logits that are not finite" in result.error
        served.engine.swap(tensors, 2, "keep")
        sent = request("good", random_prompt(0, 5), max_new_tokens=9)
        (result,) = served.run([sent])
    np.testing.assert_allclose(
        result.logprobs, hf_logprobs(hf_model(folder), sent, result)[0], atol=1e-4
    )


def test_a_swap_before_start_takes_effect_at_once(folder):
    engine = TorchGenerationEngine(folder, TorchGenerationConfig())
    engine.swap(tensors_of(folder), 9, "drain")
    assert engine.health().version == 9
    engine.close()
