"""A prompt longer than one step's prefill: computed in parts while the running turns go on."""

from collections import deque

import numpy as np
import pytest
import torch

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.running_batch import RunningBatch
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from tests.support.generation import (
    forcing_weights,
    hf_logprobs,
    hf_model,
    random_prompt,
    request,
    serving,
)
from tests.support.tiny_models import write_tiny_model

CHUNK = 16
LONG = 100
SHORT = request("short", random_prompt(1, 5), seed=1, max_new_tokens=60)
LATE = request("long", random_prompt(2, LONG), seed=2, max_new_tokens=9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("m")
    kinds = {"lean": ("qwen3", 1), "hf": ("gpt2", 1), "other": ("qwen3", 2)}
    return {
        name: write_tiny_model(root / name, family, tie_word_embeddings=False, seed=seed)
        for name, (family, seed) in kinds.items()
    }


def made(folder, chunk=CHUNK):
    config = TorchGenerationConfig(max_slots=16, max_prefill_tokens_per_step=chunk)
    return RunningBatch(load_generation_model(folder, config), config)


def prepared(folder, tensors):
    """Weights as `change_weights` takes them."""
    forward = load_generation_model(folder, TorchGenerationConfig()).forward
    return forward.prepare(tensors)


def tensors_of(folder):
    return load_tensors(folder, load_config(folder))


class Driven:
    """A batch, driven as the engine's loop does, one step at a time."""

    def __init__(self, batch, *requests):
        self.batch, self.waiting, self.results = batch, deque(requests), {}

    def step(self):
        with torch.inference_mode():
            ended = self.batch.admit(self.batch.take(self.waiting)) + self.batch.decode()
        self.results.update({result.request_id: result for result in ended})

    def until_entering(self, num_parts):
        """Go on until so many parts of a long prompt are computed."""
        while not self.batch.num_entering:
            self.step()
        for _ in range(num_parts - 1):
            self.step()
        assert self.batch.num_entering == 1
        return self

    def change_weights(self, weights, version, *, recompute=False):
        with torch.inference_mode():
            self.batch.change_weights(weights, version, recompute=recompute)

    def finish(self):
        while self.waiting or self.batch.num_rows or self.batch.num_entering:
            self.step()
        return self.results


@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_in_parts_it_gives_the_tokens_and_logprobs_of_the_whole(folders, kind):
    sent = [request(f"r{i}", random_prompt(i, 40 + 30 * i), seed=i) for i in range(4)]
    whole = Driven(made(folders[kind], 4096), *sent).finish()
    for chunk in (7, CHUNK, 64):
        batch = made(folders[kind], chunk)
        parts = Driven(batch, *sent).finish()
        assert batch.prefilled_tokens == sum(len(one.prompt_ids) for one in sent)
        for name, result in whole.items():
            np.testing.assert_array_equal(parts[name].token_ids, result.token_ids)
            np.testing.assert_allclose(parts[name].logprobs, result.logprobs, atol=1e-5)


def test_running_turns_get_a_token_in_every_step_of_it_and_no_step_computes_more(folders):
    batch = made(folders["lean"])
    driven = Driven(batch, SHORT, LATE)
    driven.step()
    num_steps = 0
    while batch.num_rows < 2:
        sampled, prefilled = batch.sampled_tokens, batch.prefilled_tokens
        driven.step()
        num_steps += 1
        # The last step also starts the long prompt's own turn: its first and second token.
        assert batch.sampled_tokens - sampled == (1 if batch.num_entering else 3)
        assert batch.prefilled_tokens - prefilled <= CHUNK
    assert num_steps == -(-LONG // CHUNK)


def test_others_enter_while_it_is_computed_and_it_goes_on_at_every_other_step(folders):
    batch = made(folders["lean"])
    others = [request(f"o{i}", random_prompt(40 + i, 14), seed=i) for i in range(6)]
    second = request("second", random_prompt(9, 50), seed=9, max_new_tokens=9)
    driven = Driven(batch, SHORT, LATE, second, *others).until_entering(1)
    num_rows, steps, prefilled = [], 0, batch.prefilled_tokens
    while batch.num_entering and len(driven.waiting) > 1:
        driven.step()
        steps += 1
        num_rows.append(batch.num_rows)
        assert batch.prefilled_tokens - prefilled <= CHUNK
        prefilled = batch.prefilled_tokens
    # Each prompt of 14 takes a step of its own, and between two of them goes a part of the long.
    assert num_rows[:11] == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]
    assert [one.request_id for one in driven.waiting] == ["second"]  # one long prompt at a time
    results = driven.finish()
    model = hf_model(folders["lean"])
    for one in (SHORT, LATE, second, *others):
        found = results[one.request_id]
        assert not found.error
        np.testing.assert_allclose(found.logprobs, hf_logprobs(model, one, found)[0], atol=1e-4)


def test_it_finds_a_slot_and_room_in_the_cache_however_many_would_pass_it(folders):
    config = TorchGenerationConfig(max_slots=3, max_prefill_tokens_per_step=CHUNK)
    batch = RunningBatch(load_generation_model(folders["lean"], config), config)
    others = [
        request(f"o{i}", random_prompt(40 + i, 5), seed=i, max_new_tokens=300) for i in range(12)
    ]
    driven = Driven(batch, LATE, *others)
    num_steps = 0
    while "long" not in driven.results:
        driven.step()
        num_steps += 1
        assert batch.num_rows + batch.num_entering <= 3
    assert num_steps <= 2 * -(-LONG // CHUNK) + 9
    assert len(driven.finish()) == 13


def test_running_turns_that_end_meanwhile_leave_it_where_it_is(folders):
    others = [
        request(f"o{i}", random_prompt(50 + i, 3), seed=i, max_new_tokens=4 + i) for i in range(4)
    ]
    driven = Driven(made(folders["lean"]), *others, LATE).until_entering(5)
    assert driven.batch.num_rows < 4
    results = driven.finish()
    model = hf_model(folders["lean"])
    for one in (*others, LATE):
        found = results[one.request_id]
        assert not found.error
        np.testing.assert_allclose(found.logprobs, hf_logprobs(model, one, found)[0], atol=1e-4)


def test_what_is_kept_of_it_is_not_computed_again(folders):
    batch = made(folders["lean"])
    first = request("t1", random_prompt(0, 60), key="e", max_new_tokens=5)
    (turn,) = Driven(batch, first).finish().values()
    prompt = np.concatenate([first.prompt_ids, turn.token_ids, random_prompt(1, 40)])
    before = batch.prefilled_tokens
    second = request("t2", prompt, key="e", max_new_tokens=5)
    results = Driven(batch, second).finish()
    assert batch.prefilled_tokens - before == 40 + 1  # the last sampled one was never fed back
    expected = hf_logprobs(hf_model(folders["lean"]), second, results["t2"])[0]
    np.testing.assert_allclose(results["t2"].logprobs, expected, atol=1e-4)


def test_an_abort_in_the_middle_ends_it_alone(folders):
    driven = Driven(made(folders["lean"]), SHORT, LATE).until_entering(3)
    assert set(driven.batch.running_ids()) == {"short", "long"}
    with torch.inference_mode():
        (aborted,) = driven.batch.abort({"long", "unknown"})
    assert aborted.stop_reason is StopReason.ABORT
    assert (aborted.request_id, len(aborted.token_ids), aborted.error) == ("long", 0, "")
    again = request("again", random_prompt(3, 50), seed=3)
    driven.waiting.append(again)
    results = driven.finish()
    assert set(results) == {"short", "again"}
    model = hf_model(folders["lean"])
    for one in (SHORT, again):
        found = results[one.request_id]
        assert not found.error
        np.testing.assert_allclose(found.logprobs, hf_logprobs(model, one, found)[0], atol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_changed_in_the_middle_sample_the_whole_turn_and_no_token_before(
    folders, recompute
):
    driven = Driven(made(folders["lean"]), SHORT, LATE).until_entering(3)
    weights = prepared(folders["lean"], tensors_of(folders["other"]))
    driven.change_weights(weights, 1, recompute=recompute)
    results = driven.finish()
    late, running = results["long"], results["short"]
    assert set(late.versions.tolist()) == {1}
    expected = hf_logprobs(hf_model(folders["other"]), LATE, late)[0]
    np.testing.assert_allclose(late.logprobs, expected, atol=1e-4)
    old = running.versions == 0
    assert 0 < old.sum() < len(old)
    before = hf_logprobs(hf_model(folders["lean"]), SHORT, running)[0]
    np.testing.assert_allclose(running.logprobs[old], before[old], atol=1e-4)


def test_each_token_carries_the_version_that_sampled_it_across_a_change_in_the_middle(folders):
    shapes = dict(made(folders["lean"])._model.forward.weight_shapes())
    driven = Driven(made(folders["lean"]), SHORT, LATE)
    driven.change_weights(prepared(folders["lean"], forcing_weights(shapes, 100)), 1)
    driven.until_entering(4)
    driven.change_weights(prepared(folders["lean"], forcing_weights(shapes, 200)), 2)
    for result in driven.finish().values():
        np.testing.assert_array_equal(result.token_ids, 100 * result.versions)
    assert set(driven.results["short"].versions.tolist()) == {1, 2}
    assert set(driven.results["long"].versions.tolist()) == {2}


@pytest.mark.parametrize("end", ["goes on", "is aborted", "ends broken"])
def test_broken_weights_in_the_middle_spoil_nothing_that_comes_after_better_ones(folders, end):
    sound = tensors_of(folders["lean"])
    broken = {name: tensor * float("nan") for name, tensor in sound.items()}
    driven = Driven(made(folders["lean"]), SHORT, LATE)
    driven.step()
    driven.change_weights(prepared(folders["lean"], broken), 1)
    driven.until_entering(3)
    assert "not finite" in driven.results["short"].error
    if end == "is aborted":
        with torch.inference_mode():
            driven.batch.abort({"long"})
    elif end == "ends broken":
        assert "not finite" in driven.finish()["long"].error
    driven.change_weights(prepared(folders["lean"], sound), 2)
    # Beside a longer row, a short one reads over the whole row, hidden columns too.
    after = [request(f"a{i}", random_prompt(i, length), seed=i) for i, length in enumerate((60, 8))]
    driven.waiting.extend(after)
    results = driven.finish()
    model = hf_model(folders["lean"])
    for one in (LATE, *after) if end == "goes on" else after:
        found = results[one.request_id]
        assert not found.error
        np.testing.assert_allclose(found.logprobs, hf_logprobs(model, one, found)[0], atol=1e-4)


# -- the engine -----------------------------------------------------------------------------------


@pytest.fixture
def served(folders):
    """An engine paused with one part of a long prompt computed and no other turn."""
    with serving(folders["lean"], max_prefill_tokens_per_step=CHUNK) as started:
        shapes = dict(started.engine.weight_shapes())
        started.engine.swap(forcing_weights(shapes, 100), 1, "keep")
        # The probe gets two tokens in its first step, the third beside the first part.
        probe = request("probe", [5], max_new_tokens=3)
        started.run_until("probe", [probe, LATE])
        assert started.engine.health().num_running == 1
        yield started


@pytest.mark.parametrize("policy", ["keep", "recompute", "drain"])
def test_a_swap_in_the_middle_waits_for_nothing_and_restamps_the_turn(served, policy):
    shapes = dict(served.engine.weight_shapes())
    served.engine.swap(forcing_weights(shapes, 200), 2, policy)
    assert served.engine.health().num_running == 1
    served.engine.resume()
    (result,) = served.wait("long")
    assert set(result.token_ids.tolist()) == {200}
    assert set(result.versions.tolist()) == {2}
    assert len(result.token_ids) == 9


def test_an_abort_of_it_comes_back_empty_and_the_engine_goes_on(served):
    served.engine.abort(["long"])
    (aborted,) = served.wait("long")
    assert aborted.stop_reason is StopReason.ABORT
    assert len(aborted.token_ids) == 0
    served.engine.resume()
    (other,) = served.run([request("other", random_prompt(5, 70), max_new_tokens=4)])
    assert other.token_ids.tolist() == [100] * 4


def test_close_hands_it_back_as_aborted(served):
    served.engine.close()
    (result,) = served.wait("long")
    assert result.stop_reason is StopReason.ABORT
    assert not result.error
