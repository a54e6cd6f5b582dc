"""What every generation engine must do, whatever it is built on.

A test module plugs an engine in by a subclass:

    class TestTorchEngine(EngineConformance):
        subject = Subject("torch", make_torch_engine)

All checks share one running engine (some take half a minute to start), so each uses request ids of
its own and puts weights back that it changed. What an engine lacks is named in `Subject.lacks` with
the reason, and its checks are skipped with it.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from areal_ray.algorithms.packing import TrainSequence
from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import joined_tops
from areal_ray.engines.frozen import sequence_logprobs
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.protocols import GenerationEngine, GenerationRequest, GenerationResult
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.train_config import TorchTrainConfig
from areal_ray.errors import EngineError
from tests.support.generation import Served, forcing_weights, hf_model, random_prompt, request
from tests.support.tiny_models import tiny_tokenizer, write_tiny_model

WINDOW = 512
"""Tokens of one turn that the engine under test is made for."""
MAX_RUNNING = 24
"""Turns at once; the checks send more, so that turns enter and leave all the time."""
END_OF_TURN = 2
_STILL_S = 1.5
"""How long processor time is watched at a time."""
_X_OR_YY = (
    'start: %json {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"],'
    ' "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'
)
"""Grammar of an object whose one key has one of two values."""
_ORDINARY = (3, 384)
"""Ids of tokens without a special meaning: the first, and one past the last."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How an engine under test is made."""

    max_context_tokens: int = WINDOW
    max_running: int = MAX_RUNNING
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Subject:
    """One kind of engine, and what it claims."""

    name: str
    make: Callable[[Path, Capacity], GenerationEngine]
    """Of a tiny Hugging Face checkpoint of version 0; not started yet."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Check, by its name without `test_`, -> why this engine is not held to it."""
    architecture: str = "qwen3"
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the tiny model's config, where the engine wants other shapes."""
    policies: tuple[str, ...] = ("keep", "recompute", "drain")
    logprob_tolerance: float = 1e-4
    idle_share: float = 0.015
    """Of a core, at most, while paused; a loop that looks every half millisecond takes 0.06."""
    keeps_draws: bool = True
    """Whether what else is in the batch never changes a token, not even by rounding."""


class Bench:
    """The running engine, its model elsewhere, and names that were not used yet."""

    def __init__(self, subject: Subject, folder: Path, other: Path) -> None:
        self.subject = subject
        self.folder = folder
        self.other = other
        self._not_its_own = set(processor_seconds(os.getpid()))
        self.served = Served(subject.make(folder, Capacity()))
        self.engine = self.served.engine
        self.version = 0
        self._numbers = itertools.count()
        self.served.start()

    def ask(self, prompt: Sequence[int] | np.ndarray, **fields: Any) -> GenerationRequest:
        """A request with a new id."""
        return request(f"turn-{next(self._numbers)}", prompt, **fields)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy: str) -> int:
        """Swap weights in as the next version; returns it."""
        self.version += 1
        self.engine.swap(tensors, self.version, policy)  # type: ignore[arg-type]
        return self.version

    def restore(self) -> None:
        """The folder's own weights again, and no pause."""
        self.publish(tensors_of(self.folder), self.subject.policies[0])
        self.engine.resume()

    def forced(self, token_id: int) -> dict[str, torch.Tensor]:
        """Weights that sample one token for ever."""
        return forcing_weights(dict(self.engine.weight_shapes()), token_id)

    def begun(self, turns: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Submit turns, streamed, and return once each has sampled something."""
        streamed = [replace(turn, is_streamed=True) for turn in turns]
        self.engine.submit(streamed)
        for turn in streamed:
            self.served.wait_chunks(turn.request_id)
        return streamed

    def processor_seconds(self) -> float:
        """Processor time of the threads and processes that came with the engine."""
        used = processor_seconds(os.getpid())
        return sum(used[task] for task in used.keys() - self._not_its_own)

    def least_share(self) -> float:
        """Of a core, that the engine uses in the quietest of a few spans: what is left of submits
        and replies passes, what looks again and again does not."""
        shares = []
        for _ in range(12):  # where cores are shared, what is left may take a while to pass
            used, begin = self.processor_seconds(), time.monotonic()
            time.sleep(_STILL_S)
            shares.append((self.processor_seconds() - used) / (time.monotonic() - begin))
            if shares[-1] < self.subject.idle_share:
                break
        return min(shares)

    def results(self, turns: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Of turns submitted before; each without error."""
        found = self.served.wait(*(turn.request_id for turn in turns))
        assert [result.error for result in found] == [""] * len(turns)
        return found

    def run(self, turns: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Submit turns and return their results; each without error."""
        self.engine.submit(turns)
        return self.results(turns)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, a tied head left out."""
    return load_tensors(folder, load_config(folder))


def prompt_of(seed: int, length: int) -> np.ndarray:
    """Ordinary token ids."""
    return np.random.default_rng(seed).integers(*_ORDINARY, length).astype(np.int32)


def trainer_logprobs(
    folder: Path, turns: Sequence[GenerationRequest], results: Sequence[GenerationResult]
) -> list[np.ndarray]:
    """[N] of each turn's sampled tokens by the learner's own forward pass, at its temperature."""
    config = TorchTrainConfig()
    forward = RowForward(load_causal_model(folder, config), config)
    found = []
    for number, (turn, result) in enumerate(zip(turns, results, strict=True)):
        ids = np.concatenate([turn.prompt_ids, result.token_ids])
        is_sampled = np.arange(len(ids)) >= len(turn.prompt_ids)
        sequence = TrainSequence(ids, is_sampled, number)
        temperature = turn.sampling.temperature or 1.0
        found.append(sequence_logprobs(forward, [sequence], temperature).numpy())
    return found


def assert_whole(result: GenerationResult) -> None:
    """Types and lengths of what comes back."""
    count = len(result.token_ids)
    assert (len(result.logprobs), len(result.versions)) == (count, count)
    dtypes = (result.token_ids.dtype, result.logprobs.dtype, result.versions.dtype)
    assert dtypes == (np.int32, np.float32, np.int32)
    assert np.isfinite(result.logprobs).all()
    assert (result.logprobs <= 1e-6).all()


def assert_likeliest(
    model: Any, turn: GenerationRequest, result: GenerationResult, tolerance: float
) -> None:
    """As many as were asked for, by a softmax over the whole vocabulary and a plain topk."""
    if not turn.top_logprobs:
        assert result.top is None
        return
    assert result.top is not None
    ids = torch.from_numpy(np.concatenate([turn.prompt_ids, result.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1].float()
    whole = torch.log_softmax(logits / (turn.sampling.temperature or 1.0), -1)
    found, logprobs = torch.from_numpy(result.top.token_ids.astype(np.int64)), result.top.logprobs
    assert found.shape == logprobs.shape == (len(result.token_ids), turn.top_logprobs)
    expected = torch.topk(whole, turn.top_logprobs).values
    np.testing.assert_allclose(logprobs, expected, atol=tolerance)  # and so their order
    np.testing.assert_allclose(whole.gather(1, found), expected, atol=tolerance)
    assert all(len(set(place)) == turn.top_logprobs for place in found.tolist())
    is_sampled = found.numpy() == result.token_ids[:, None]
    own = np.broadcast_to(result.logprobs[:, None], logprobs.shape)
    np.testing.assert_array_equal(logprobs[is_sampled], own[is_sampled])


def processor_seconds(root: int) -> dict[tuple[str, str], float]:
    """Processor time so far of each thread of a process and of all processes below it."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[stat.parent.name] = stat.read_text().rsplit(")", 1)[1].split()[1]
        except OSError:  # it ended meanwhile
            continue
    tree, grown = {str(root)}, True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree, grown = tree | below, bool(below)
    for pid in tree:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            ticks = int(fields[11]) + int(fields[12])
            used[pid, stat.parent.name] = ticks / os.sysconf("SC_CLK_TCK")
    return used


class EngineConformance:
    """The checks; subclass it in a test module and name the engine."""

    subject: ClassVar[Subject]

    @pytest.fixture(scope="class")
    @classmethod
    def folders(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        """Two models of one shape, with untied heads so that weights can force a token."""
        root, subject = tmp_path_factory.mktemp("models"), cls.subject
        fields = {"tie_word_embeddings": False, **subject.model_fields}
        first, second = (
            write_tiny_model(root / str(seed), subject.architecture, seed=seed, **fields)
            for seed in (1, 2)
        )
        return first, second

    @pytest.fixture(scope="class")
    @classmethod
    def shared_bench(cls, folders: tuple[Path, Path]) -> Iterator[Bench]:
        bench = Bench(cls.subject, *folders)
        yield bench
        bench.engine.close()

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest, shared_bench: Bench) -> Bench:
        """The engine that all checks share; skips what it lacks."""
        self._skip_what_is_lacking(request)
        return shared_bench

    def _skip_what_is_lacking(self, request: pytest.FixtureRequest) -> None:
        check = request.function.__name__.removeprefix("test_")
        if check in self.subject.lacks:
            pytest.skip(f"{self.subject.name}: {self.subject.lacks[check]}")

    # -- the numbers ----------------------------------------------------------------------------

    def test_logprobs_are_those_of_the_train_engine(self, bench: Bench) -> None:
        lengths = np.random.default_rng(5).integers(1, 60, (40, 2)).tolist()
        turns = [
            bench.ask(
                prompt_of(i, prompt),
                seed=i,
                temperature=(1.0, 0.7, 1.3, 0.0)[i % 4],
                max_new_tokens=limit,
            )
            for i, (prompt, limit) in enumerate(lengths)
        ]
        results = bench.run(turns)
        for result in results:
            assert_whole(result)
        expected = trainer_logprobs(bench.folder, turns, results)
        worst = max(
            float(np.abs(result.logprobs - logprobs).max())
            for result, logprobs in zip(results, expected, strict=True)
        )
        assert worst <= bench.subject.logprob_tolerance

    def test_filters_leave_the_recorded_logprobs_those_of_the_policy(self, bench: Bench) -> None:
        ways: list[dict[str, Any]] = [
            {"top_p": 0.8},
            {"top_k": 5, "temperature": 0.7},
            {"min_p": 0.2, "temperature": 1.4},
        ]
        turns = [bench.ask(prompt_of(i, 12), seed=i, **way) for i, way in enumerate(ways * 3)]
        results = bench.run(turns)
        for result, logprobs in zip(
            results, trainer_logprobs(bench.folder, turns, results), strict=True
        ):
            np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)

    def test_a_grammar_holds_the_text_and_leaves_the_recorded_logprobs_those_of_the_policy(
        self, bench: Bench
    ) -> None:
        ways: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}]
        turns = [
            replace(bench.ask(prompt_of(i, 12), seed=i, **way), grammar=_X_OR_YY)
            for i, way in enumerate(ways * 3)
        ]
        results = bench.run([*turns, bench.ask(prompt_of(9, 12), max_new_tokens=40)])[:-1]
        tokenizer = tiny_tokenizer()
        for result in results:
            assert result.error == ""
            assert result.stop_reason is StopReason.STOP
            text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
            assert json.loads(text)["a"] in ("x", "yy")
        for result, logprobs in zip(
            results, trainer_logprobs(bench.folder, turns, results), strict=True
        ):
            np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)

    def test_a_grammar_that_cannot_be_kept_refuses_its_turn_and_no_other(
        self, bench: Bench
    ) -> None:
        unkept = 'start: %json {"type": "array", "uniqueItems": true}'
        bad = replace(bench.ask(prompt_of(1, 5)), grammar=unkept)
        good = bench.ask(prompt_of(2, 5), max_new_tokens=5)
        bench.engine.submit([bad, good])
        refused, other = bench.served.wait(bad.request_id, good.request_id)
        assert "uniqueItems" in refused.error
        assert refused.is_refused
        assert_whole(other)

    def test_the_likeliest_tokens_told_are_those_of_the_distribution_that_is_recorded(
        self, bench: Bench
    ) -> None:
        ways: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.5}, {"temperature": 0.0}]
        turns = [
            bench.ask(
                prompt_of(i, 12), seed=i, top=top, streamed=i > 4, max_new_tokens=3 + i, **way
            )
            for i, (top, way) in enumerate(itertools.product((0, 1, 5, 20), ways))
        ]
        results = bench.run(turns)
        model = hf_model(bench.folder)
        for turn, result in zip(turns, results, strict=True):
            assert_likeliest(model, turn, result, bench.subject.logprob_tolerance)
            chunks = bench.served.chunks.get(turn.request_id, [])
            joined = joined_tops([chunk.top for chunk in chunks])
            assert (joined is None) == (not chunks or not turn.top_logprobs)
            if joined is not None:
                assert result.top is not None
                np.testing.assert_array_equal(joined.token_ids, result.top.token_ids)
                np.testing.assert_array_equal(joined.logprobs, result.top.logprobs)
        if bench.subject.keeps_draws:
            plain = [
                bench.ask(turn.prompt_ids, seed=i, max_new_tokens=3 + i, **ways[i % 3])
                for i, turn in enumerate(turns)
            ]
            for one, other in zip(bench.run(plain), results, strict=True):
                np.testing.assert_array_equal(one.token_ids, other.token_ids)

    def test_filters_keep_to_the_likely_tokens(self, bench: Bench) -> None:
        turns = [bench.ask(prompt_of(i, 12), seed=i, top_k=1, max_new_tokens=20) for i in range(3)]
        greedy = [bench.ask(t.prompt_ids, temperature=0.0, max_new_tokens=20) for t in turns]
        for one, other in zip(bench.run(turns), bench.run(greedy), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)

    def test_greedy_equals_generate_of_transformers(self, bench: Bench) -> None:
        model = hf_model(bench.folder)
        turns = [
            bench.ask(prompt_of(i, 1 + 9 * i), temperature=0.0, max_new_tokens=30) for i in range(6)
        ]
        for turn, result in zip(turns, bench.run(turns), strict=True):
            ids = torch.from_numpy(turn.prompt_ids.astype(np.int64))[None]
            with torch.no_grad():
                expected = model.generate(ids, do_sample=False, max_new_tokens=30)
            np.testing.assert_array_equal(result.token_ids, expected[0, ids.shape[1] :].numpy())

    def test_half_precision_is_near_and_reported(
        self, request: pytest.FixtureRequest, folders: tuple[Path, Path], record_property: Any
    ) -> None:
        self._skip_what_is_lacking(request)
        served = Served(self.subject.make(folders[0], Capacity(dtype="bfloat16")))
        served.start()
        try:
            turns = [
                request_of(f"half-{i}", prompt_of(i, 20), seed=i, max_new_tokens=40)
                for i in range(8)
            ]
            results = served.run(turns)
        finally:
            served.engine.close()
        expected = trainer_logprobs(folders[0], turns, results)
        differences = np.abs(
            np.concatenate([r.logprobs for r in results]) - np.concatenate(expected)
        )
        record_property("bfloat16_logprob_max_difference", float(differences.max()))
        print(
            f"{self.subject.name}: bfloat16 log-probs differ from float32 training by "
            f"{differences.mean():.4f} on average, {differences.max():.4f} at most"
        )
        assert differences.mean() < 0.05

    # -- how a turn ends ------------------------------------------------------------------------

    def test_a_stop_token_ends_a_turn_and_is_part_of_it(self, bench: Bench) -> None:
        (free,) = bench.run([bench.ask(prompt_of(3, 9), seed=3, max_new_tokens=40)])
        tokens = free.token_ids.tolist()
        wanted = tokens[min(12, len(tokens) - 1)]
        (stopped,) = bench.run(
            [bench.ask(prompt_of(3, 9), seed=3, max_new_tokens=40, stop_token_ids=(wanted,))]
        )
        assert stopped.stop_reason is StopReason.STOP
        assert stopped.token_ids.tolist() == tokens[: tokens.index(wanted) + 1]
        np.testing.assert_allclose(
            stopped.logprobs, free.logprobs[: len(stopped.logprobs)], atol=1e-4
        )

    def test_the_end_of_turn_token_ends_a_turn(self, bench: Bench) -> None:
        version = bench.publish(bench.forced(END_OF_TURN), bench.subject.policies[0])
        try:
            (result,) = bench.run([bench.ask([5, 6, 7], max_new_tokens=30)])
        finally:
            bench.restore()
        assert result.token_ids.tolist() == [END_OF_TURN]
        assert result.versions.tolist() == [version]
        assert result.stop_reason is StopReason.STOP

    def test_a_stop_text_ends_a_turn_with_the_token_that_completes_it(self, bench: Bench) -> None:
        (free,) = bench.run([bench.ask(prompt_of(4, 9), seed=4, max_new_tokens=40)])
        tokenizer, tokens = tiny_tokenizer(), free.token_ids.tolist()
        texts = [tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))]
        last = min(14, len(tokens) - 1)
        wanted = texts[last][-3:]  # over the border of tokens
        first = next(i for i, text in enumerate(texts) if wanted in text)
        (result,) = bench.run(
            [bench.ask(prompt_of(4, 9), seed=4, max_new_tokens=40, stop=(wanted,))]
        )
        assert result.stop_reason is StopReason.STOP
        assert result.token_ids.tolist() == tokens[: first + 1]
        assert_whole(result)

    def test_limits_of_turn_and_window_truncate(self, bench: Bench) -> None:
        bench.publish(bench.forced(100), bench.subject.policies[0])
        try:
            limited, windowed = bench.run(
                [
                    bench.ask(prompt_of(0, 9), max_new_tokens=7),
                    bench.ask(prompt_of(1, WINDOW - 5), max_new_tokens=64),
                ]
            )
        finally:
            bench.restore()
        assert (limited.stop_reason, windowed.stop_reason) == (StopReason.LENGTH,) * 2
        assert (limited.token_ids.tolist(), windowed.token_ids.tolist()) == ([100] * 7, [100] * 5)

    # -- many, and some that are wrong ----------------------------------------------------------

    def test_two_hundred_at_once_all_come_back_as_asked(self, bench: Bench) -> None:
        turns = [
            bench.ask(
                prompt_of(i % 50, 5 + i % 50), seed=i, key=f"g{i % 50}", max_new_tokens=1 + i % 37
            )
            for i in range(200)
        ]
        results = bench.run(turns)
        for turn, result in zip(turns, results, strict=True):
            assert_whole(result)
            assert set(result.versions.tolist()) == {bench.version}
            is_full = len(result.token_ids) == turn.sampling.max_new_tokens
            assert is_full or result.stop_reason is StopReason.STOP
        assert len({result.token_ids.tobytes() for result in results}) > 150
        health = bench.engine.health()
        assert (health.num_running, health.num_waiting) == (0, 0)
        worst = max(
            float(np.abs(result.logprobs - logprobs).max())
            for result, logprobs in zip(
                results, trainer_logprobs(bench.folder, turns, results), strict=True
            )
        )
        assert worst <= bench.subject.logprob_tolerance

    def test_a_bad_request_comes_back_naming_itself_and_the_others_go_on(
        self, bench: Bench
    ) -> None:
        bad = [
            bench.ask([]),
            bench.ask([5] * WINDOW),
            bench.ask([5, 384]),
            bench.ask([5, -1]),
            bench.ask([5, 6], logit_bias={"384": 1.0}),
        ]
        good = bench.ask([5, 6], max_new_tokens=3)
        bench.engine.submit([*bad[:3], good, *bad[3:]])
        bench.results([good])
        found = bench.served.wait(*(turn.request_id for turn in bad))
        for turn, result in zip(bad, found, strict=True):
            assert turn.request_id in result.error
            assert len(result.token_ids) == 0
        assert "384" in found[2].error
        assert str(WINDOW) in found[1].error

    # -- seeds ----------------------------------------------------------------------------------

    def test_a_seed_fixes_the_draws_whatever_else_is_in_the_batch(self, bench: Bench) -> None:
        def watched() -> list[GenerationRequest]:
            return [bench.ask(prompt_of(i, 20), seed=1000 + i, max_new_tokens=25) for i in range(4)]

        alone = [bench.run([turn])[0] for turn in watched()]
        noise = [
            bench.ask(prompt_of(70 + i, 5 + i), seed=i, max_new_tokens=3 + 2 * i) for i in range(20)
        ]
        mixed = watched()
        bench.engine.submit([*noise[:10], *mixed, *noise[10:]])
        bench.results(noise)
        same = [
            one.token_ids.tolist() == other.token_ids.tolist()
            for one, other in zip(alone, bench.results(mixed), strict=True)
        ]
        assert all(same) if bench.subject.keeps_draws else sum(same) >= 3

    def test_other_seeds_draw_others(self, bench: Bench) -> None:
        turns = [bench.ask(prompt_of(8, 20), seed=i, key="g", max_new_tokens=20) for i in range(8)]
        assert len({tuple(result.token_ids.tolist()) for result in bench.run(turns)}) == 8

    # -- streams --------------------------------------------------------------------------------

    def test_chunks_end_to_end_are_the_whole_turn(self, bench: Bench) -> None:
        turns = [
            bench.ask(prompt_of(i, 10), seed=i, streamed=i % 4 != 3, max_new_tokens=5 + i)
            for i in range(40)
        ]
        most = 0
        for turn, result in zip(turns, bench.run(turns), strict=True):
            chunks = bench.served.chunks.get(turn.request_id, [])
            most = max(most, len(chunks))
            if not turn.is_streamed:
                assert not chunks
                continue
            assert all(len(chunk.token_ids) for chunk in chunks)
            for name in ("token_ids", "logprobs", "versions"):
                joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
                np.testing.assert_array_equal(joined, getattr(result, name))
                assert joined.dtype == getattr(result, name).dtype
        assert most > 1  # where the machine is slow, steps share a chunk
        assert not bench.served.wrong

    # -- pause, abort ---------------------------------------------------------------------------

    def test_nothing_is_sampled_while_paused_and_no_processor_time_is_used(
        self, bench: Bench
    ) -> None:
        bench.publish(bench.forced(100), bench.subject.policies[0])
        turns = bench.begun([bench.ask(prompt_of(i, 9), max_new_tokens=400) for i in range(4)])
        bench.engine.pause()
        try:
            time.sleep(0.3)  # what was under way has been told
            before = bench.engine.health()
            assert bench.least_share() < bench.subject.idle_share
            after = bench.engine.health()
            assert after.sampled_tokens == before.sampled_tokens
            assert after.num_running + after.num_waiting == 4
        finally:
            bench.engine.resume()
            results = bench.results(turns)
            bench.restore()
        assert [result.token_ids.tolist() for result in results] == [[100] * 400] * 4

    def test_an_abort_returns_what_was_sampled_and_frees_the_turns_place(
        self, bench: Bench
    ) -> None:
        bench.publish(bench.forced(100), bench.subject.policies[0])
        try:
            count = MAX_RUNNING + 2
            turns = [bench.ask(prompt_of(i, 9), max_new_tokens=450) for i in range(count)]
            running = bench.begun(turns[:2])
            bench.engine.submit(turns[2:])
            bench.engine.abort([turns[0].request_id, turns[-1].request_id, "unknown"])
            first, last = bench.results([turns[0], turns[-1]])
            bench.engine.abort([turn.request_id for turn in turns[1:-1]])
            rest = bench.results(turns[1:-1])
            health = bench.engine.health()
        finally:
            bench.restore()
        assert 1 <= len(first.token_ids) < 450
        assert {result.stop_reason for result in (first, last, *rest)} == {StopReason.ABORT}
        for result in (first, last, *rest):
            assert result.token_ids.tolist() == [100] * len(result.token_ids)
            assert_whole(result)
        assert (health.num_running, health.num_waiting) == (0, 0)
        streamed = bench.served.chunks[running[0].request_id]
        assert sum(len(chunk.token_ids) for chunk in streamed) == len(first.token_ids)
        assert not bench.served.wrong

    def test_turns_cancelled_at_once_come_back_and_leave_nothing(self, bench: Bench) -> None:
        turns = [bench.ask(prompt_of(i, 30), max_new_tokens=300) for i in range(50)]
        for turn in turns:
            bench.engine.submit([turn])
            bench.engine.abort([turn.request_id])
        for result in bench.results(turns):
            assert result.stop_reason in (StopReason.ABORT, StopReason.STOP)
        health = bench.engine.health()
        assert (health.num_running, health.num_waiting) == (0, 0)

    # -- weights --------------------------------------------------------------------------------

    @pytest.mark.parametrize("policy", ["keep", "recompute", "drain"])
    @pytest.mark.parametrize(
        "is_paused",
        [False, pytest.param(True, marks=pytest.mark.extended)],
        ids=["running", "paused"],
    )
    def test_no_token_carries_the_version_of_weights_that_did_not_sample_it(
        self, bench: Bench, policy: str, is_paused: bool
    ) -> None:
        if policy not in bench.subject.policies:
            pytest.skip(f"{bench.subject.name}: has no policy {policy}")
        sampled_by = {bench.publish(bench.forced(100), bench.subject.policies[0]): 100}
        try:
            turns = [bench.ask(prompt_of(i, 6 + i), max_new_tokens=300) for i in range(6)]
            turns = bench.begun(turns)
            if is_paused:
                bench.engine.pause()
            sampled_by[bench.publish(bench.forced(200), policy)] = 200
            if is_paused:
                bench.engine.resume()
            after = bench.run([bench.ask([5], max_new_tokens=3)])
            results = [*bench.results(turns), *after]
            assert bench.engine.health().version == bench.version
        finally:
            bench.restore()
        for result in results:
            expected = [sampled_by[version] for version in result.versions.tolist()]
            assert result.token_ids.tolist() == expected
            assert (np.diff(result.versions) >= 0).all()
        assert set(after[0].versions.tolist()) == {max(sampled_by)}
        spans = {tuple(sorted(set(r.versions.tolist()))) for r in results[:-1]}
        old_alone, both = (min(sampled_by),), tuple(sorted(sampled_by))
        assert spans == {old_alone if policy == "drain" else both}
        for turn, result in zip(turns, results, strict=False):
            chunks = bench.served.chunks[turn.request_id]
            stamped = np.concatenate([chunk.versions for chunk in chunks])
            np.testing.assert_array_equal(stamped, result.versions)

    def test_after_recompute_a_turn_samples_exactly_from_the_new_weights(
        self, bench: Bench
    ) -> None:
        if "recompute" not in bench.subject.policies:
            pytest.skip(f"{bench.subject.name}: has no policy recompute")
        turns = bench.begun([bench.ask(prompt_of(i, 30), seed=i, max_new_tokens=300) for i in [1]])
        bench.engine.pause()
        try:
            new = bench.publish(tensors_of(bench.other), "recompute")
            bench.engine.resume()
            results = bench.results(turns)
        finally:
            bench.restore()
        expected = trainer_logprobs(bench.other, turns, results)
        for result, logprobs in zip(results, expected, strict=True):
            is_new = result.versions == new
            np.testing.assert_allclose(
                result.logprobs[is_new], logprobs[is_new], atol=bench.subject.logprob_tolerance
            )

    def test_a_swap_names_what_is_missing_extra_or_misshapen_and_changes_nothing(
        self, bench: Bench
    ) -> None:
        tensors = tensors_of(bench.other)
        tensors["lm_head.bias"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:5]
        with pytest.raises(EngineError) as caught:
            bench.engine.swap(tensors, bench.version + 1, "keep")
        for name in ("model.norm.weight", "lm_head.bias", "lm_head.weight"):
            assert name in str(caught.value)
        assert bench.engine.health().version == bench.version
        turn = bench.ask(prompt_of(0, 9), max_new_tokens=9)
        (result,) = bench.run([turn])
        (expected,) = trainer_logprobs(bench.folder, [turn], [result])
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)

    def test_swapped_weights_are_copied_so_the_caller_may_reuse_its_buffers(
        self, bench: Bench
    ) -> None:
        tensors = {name: tensor.clone() for name, tensor in tensors_of(bench.other).items()}
        bench.publish(tensors, bench.subject.policies[0])
        try:
            for tensor in tensors.values():
                tensor.fill_(7.0)
            turn = bench.ask(prompt_of(0, 9), max_new_tokens=9)
            (result,) = bench.run([turn])
        finally:
            bench.restore()
        (expected,) = trainer_logprobs(bench.other, [turn], [result])
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)

    # -- scores ---------------------------------------------------------------------------------

    def test_scores_are_the_logprobs_of_sampling_under_the_weights_in_force(
        self, bench: Bench
    ) -> None:
        turn = bench.ask(prompt_of(2, 30), seed=3, max_new_tokens=40)
        (result,) = bench.run([turn])
        ids = np.concatenate([turn.prompt_ids, result.token_ids])
        scores = bench.engine.score(ids)
        assert (scores.dtype, scores.shape) == (np.float32, (len(ids) - 1,))
        tolerance = bench.subject.logprob_tolerance
        np.testing.assert_allclose(scores[29:], result.logprobs, atol=tolerance)
        bench.engine.pause()  # as the canary asks, before anything is sampled
        try:
            bench.publish(tensors_of(bench.other), bench.subject.policies[0])
            (expected,) = trainer_logprobs(bench.other, [turn], [result])
            np.testing.assert_allclose(bench.engine.score(ids)[29:], expected, atol=tolerance)
        finally:
            bench.restore()

    def test_ids_that_cannot_be_scored_are_refused(self, bench: Bench) -> None:
        for ids in ([], [5] * (WINDOW + 1), [5, 384]):
            with pytest.raises(EngineError):
                bench.engine.score(np.array(ids, np.int32))
        assert len(bench.engine.score(prompt_of(0, 50))) == 49

    # -- sleep ----------------------------------------------------------------------------------

    def test_turns_go_on_after_sleep_under_the_weights_then_in_force(self, bench: Bench) -> None:
        with pytest.raises(EngineError):
            bench.engine.sleep()  # not paused
        before = [bench.ask(prompt_of(i, 9 + i), seed=i, max_new_tokens=200) for i in range(5)]
        before = bench.begun(before)
        bench.engine.pause()
        try:
            bench.engine.sleep()
            new = bench.publish(tensors_of(bench.other), bench.subject.policies[0])
            waiting = [bench.ask(prompt_of(20 + i, 9), max_new_tokens=20) for i in range(3)]
            bench.engine.submit(waiting)
            assert bench.least_share() < bench.subject.idle_share
            bench.engine.wake()
            bench.engine.resume()
            results = bench.results([*before, *waiting])
        finally:
            bench.restore()
        expected = trainer_logprobs(bench.other, [*before, *waiting], results)
        assert any(new in result.versions for result in results[:5])
        for result, logprobs in zip(results, expected, strict=True):
            is_new = result.versions == new
            np.testing.assert_allclose(
                result.logprobs[is_new], logprobs[is_new], atol=bench.subject.logprob_tolerance
            )
        for result in results[5:]:
            assert set(result.versions.tolist()) == {new}

    # -- the end --------------------------------------------------------------------------------

    def test_close_hands_back_what_is_unfinished_and_takes_no_more(
        self, request: pytest.FixtureRequest, folders: tuple[Path, Path]
    ) -> None:
        self._skip_what_is_lacking(request)
        served = Served(self.subject.make(folders[0], Capacity(max_running=2)))
        served.start()
        shapes = dict(served.engine.weight_shapes())
        served.engine.swap(forcing_weights(shapes, 100), 1, self.subject.policies[0])  # type: ignore[arg-type]
        served.engine.submit(
            [request_of(f"r{i}", random_prompt(i, 5), max_new_tokens=450) for i in range(4)]
        )
        served.engine.close()
        results = served.wait(*(f"r{i}" for i in range(4)))
        assert {result.stop_reason for result in results} == {StopReason.ABORT}
        with pytest.raises(EngineError):
            served.engine.submit([request_of("late", [5])])


request_of = request
"""`request` under a name that pytest's fixture does not take."""
