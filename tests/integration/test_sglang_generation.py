"""The SGLang adapter over real sockets, against a scripted server with a real tiny model inside."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.sglang_generation import SglangGenerationEngine
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.errors import EngineDied, EngineError
from tests.support.command_line import is_alive
from tests.support.generation import (
    Served,
    forcing_weights,
    hf_logprobs,
    hf_model,
    random_prompt,
    request,
)
from tests.support.sglang_server import (
    ScriptedServer,
    scripted_server,
    server_below,
    write_interpreter,
)
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@contextmanager
def served(
    folder: Path, *, version: int = 0, step_s: float = 0.0, **config: Any
) -> Iterator[tuple[Served, ScriptedServer]]:
    with scripted_server(folder, version=str(version), step_s=step_s) as server:
        settings = {"num_retries": 2, **config}
        engine = SglangGenerationEngine(
            folder, SglangGenerationConfig(url=server.url, **settings), version=version
        )
        client = Served(engine)
        client.start()
        try:
            yield client, server
        finally:
            engine.close()


def until(is_so: Any, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def joined(client: Served, request_id: str, name: str) -> list[Any]:
    return np.concatenate([getattr(c, name) for c in client.chunks[request_id]]).tolist()


# -- sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_the_model_at_the_sampling_temperature(folder, temperature):
    with served(folder) as (client, _):
        sent = [
            request(f"r{i}", random_prompt(i, 9 + i), seed=i, max_new_tokens=6,
                    temperature=temperature)
            for i in range(4)
        ]  # fmt: skip
        results = client.run(sent)
    model = hf_model(folder)
    for turn, result in zip(sent, results, strict=True):
        logprobs, greedy = hf_logprobs(model, turn, result)
        np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-5)
        assert result.versions.tolist() == [0] * 6
        assert result.stop_reason == StopReason.LENGTH
        assert (temperature > 0) or (result.token_ids == greedy).all()


def test_two_hundred_turns_at_once_and_their_seeds_decide(folder):
    with served(folder, max_in_flight=64) as (client, _):
        sent = [request(f"a{i}", random_prompt(i % 5, 8), seed=i, max_new_tokens=4)
                for i in range(200)]  # fmt: skip
        many = client.run(sent)
        alone = client.run([request("again", random_prompt(2, 8), seed=137, max_new_tokens=4)])
    assert many[137].token_ids.tolist() == alone[0].token_ids.tolist()
    assert len({tuple(result.token_ids) for result in many}) > 100


@pytest.mark.parametrize("is_incremental", [False, True])
def test_the_chunks_of_a_streamed_turn_are_its_result(folder, is_incremental):
    with served(folder, step_s=0.003) as (client, server):
        server.is_incremental = is_incremental
        plain = request("plain", random_prompt(1, 7), max_new_tokens=9)
        results = client.run(
            [request("s", random_prompt(0, 7), max_new_tokens=9, streamed=True), plain]
        )
        assert len(client.chunks["s"]) > 2
    for name in ("token_ids", "logprobs", "versions"):
        assert joined(client, "s", name) == getattr(results[0], name).tolist()
    assert set(client.chunks) == {"s"}
    assert client.wrong == []


def test_a_stop_token_ends_a_turn_and_stays_in_it(folder):
    with served(folder) as (client, _):
        weights = forcing_weights(client.engine.weight_shapes(), 77)
        client.engine.swap(weights, 1, "keep")
        stopped, cut = client.run(
            [
                request("stopped", [5, 6], max_new_tokens=4, stop_token_ids=(77,)),
                request("cut", [5, 6], max_new_tokens=4),
            ]
        )
    assert (stopped.token_ids.tolist(), stopped.stop_reason) == ([77], StopReason.STOP)
    assert (cut.token_ids.tolist(), cut.stop_reason) == ([77] * 4, StopReason.LENGTH)


def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it(folder):
    with served(folder, step_s=0.002) as (client, server):
        from tokenizers import Tokenizer

        token = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids[0]
        client.engine.swap(forcing_weights(client.engine.weight_shapes(), token), 1, "keep")
        result = client.run([request("r", [5], max_new_tokens=50, stop=("aaa",))])[0]
        assert (result.token_ids.tolist(), result.stop_reason) == ([token] * 3, StopReason.STOP)
        until(lambda: not server.running)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (request("r", []), "the prompt is empty"),
        (request("r", [5] * 2000), "context window"),
        (request("r", [5, 9999]), "token ids are 5..9999"),
        (request("r", [5], repetition_penalty=1.2), "repetition_penalty: the server would record"),
    ],
)
def test_a_bad_request_comes_back_with_what_is_wrong_with_it(folder, sent, told):
    with served(folder) as (client, _):
        error = client.run([sent])[0].error
    assert error.startswith("request r: ")
    assert told in error


# -- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    "path", [{"weight_path": "disk"}, {"weight_path": "tensor", "bucket_bytes": 2**20}],
    ids=lambda path: path["weight_path"],
)  # fmt: skip
def test_every_token_of_a_running_turn_carries_the_version_that_sampled_it(folder, policy, path):
    with served(folder, step_s=0.004, **path) as (client, server):
        engine = client.engine
        client.engine.submit(
            [
                request("read along", random_prompt(0, 20), max_new_tokens=90, streamed=True),
                request("whole", random_prompt(1, 20), max_new_tokens=90),
            ]
        )
        for version in (1, 2, 3):
            time.sleep(0.06)
            idle_s = engine.swap(
                forcing_weights(engine.weight_shapes(), 40 + version), version, policy
            )
            assert 0.0 < idle_s < 5.0
        results = client.wait("read along", "whole")
        keys = [b["extra_key"] for v, b in server.calls if v == "generate" and "rid" in b]
        flushes = [b["flush_cache"] for v, b in server.calls if "weight_version" in b]
    for result in results:
        assert result.stop_reason == StopReason.LENGTH
        assert sorted(set(result.versions.tolist())) == [0, 1, 2, 3]
        assert (np.diff(result.versions) >= 0).all()
        forced = result.versions > 0
        assert (result.token_ids[forced] == 40 + result.versions[forced]).all()
    assert joined(client, "read along", "versions") == results[0].versions.tolist()
    assert set(flushes) == {policy == "recompute"}
    assert set(keys) == {"version-0"}, "a turn that goes on finds its own keys and values"


def test_a_turn_that_begins_after_an_update_never_sees_older_keys_and_values(folder):
    with served(folder) as (client, server):
        client.run([request("old", [5, 6, 7], max_new_tokens=2)])
        client.engine.swap(forcing_weights(client.engine.weight_shapes(), 50), 1, "keep")
        client.run([request("new", [5, 6, 7], max_new_tokens=2)])
        keys = [b["extra_key"] for v, b in server.calls if v == "generate" and "rid" in b]
    assert keys == ["version-0", "version-1"]


@pytest.mark.parametrize("is_paused", [False, True])
def test_drain_ends_what_runs_under_its_version_and_begins_the_rest_under_the_next(
    folder, is_paused
):
    with served(folder, step_s=0.004, max_in_flight=1) as (client, _):
        sent = [request(name, random_prompt(1, 9), max_new_tokens=30) for name in ("one", "two")]
        client.engine.submit(sent)
        until(lambda: client.engine.health().num_running == 1)
        if is_paused:
            client.engine.pause()
        client.engine.swap(forcing_weights(client.engine.weight_shapes(), 50), 1, "drain")
        one = client.wait("one")[0]
        assert one.versions.tolist() == [0] * 30
        if is_paused:
            time.sleep(0.1)
            assert client.engine.health().num_waiting == 1
            client.engine.resume()
        two = client.wait("two")[0]
    assert two.versions.tolist() == [1] * 30
    assert two.token_ids.tolist() == [50] * 30


def test_a_swap_that_the_server_refuses_ends_the_engine(folder):
    with served(folder, weight_path="tensor") as (client, server):
        server.is_updating = True  # another update is under way there
        with pytest.raises(EngineError, match="already open"):
            client.engine.swap(forcing_weights(client.engine.weight_shapes(), 50), 1, "keep")
        with pytest.raises(EngineError, match="version 1 is not loaded"):
            client.engine.health()
        with pytest.raises(EngineError, match="version 1 is not loaded"):
            client.engine.submit([request("r", [5])])


def test_tensors_of_another_model_are_refused_before_anything_stops(folder):
    with served(folder) as (client, server):
        weights = forcing_weights(client.engine.weight_shapes(), 50)
        weights.pop("lm_head.weight")
        with pytest.raises(EngineError, match=r"missing: lm_head\.weight"):
            client.engine.swap(weights, 1, "keep")
        assert "pause_generation" not in [verb for verb, _ in server.calls]
        assert client.run([request("r", [5], max_new_tokens=2)])[0].versions.tolist() == [0, 0]


# -- stopping -----------------------------------------------------------------------------------


def test_an_abort_ends_a_turn_wherever_it_is_and_no_other(folder):
    with served(folder, step_s=0.004, max_in_flight=2) as (client, _):
        sent = [request(name, random_prompt(1, 9), max_new_tokens=400)
                for name in ("r1", "r10", "waiting")]  # fmt: skip
        client.engine.submit(sent)
        until(lambda: client.engine.health().num_running == 2)
        time.sleep(0.05)
        client.engine.abort(["r1", "waiting", "unknown"])
        running, waiting = client.wait("r1", "waiting")
        assert 0 < len(running.token_ids) < 400
        assert len(waiting.token_ids) == 0
        assert {running.stop_reason, waiting.stop_reason} == {StopReason.ABORT}
        assert running.error == waiting.error == ""
        client.engine.abort(["r10"])
        assert client.wait("r10")[0].stop_reason == StopReason.ABORT
        client.engine.submit([request("at once", [5], max_new_tokens=900)])
        client.engine.abort(["at once"])
        assert client.wait("at once")[0].stop_reason == StopReason.ABORT


def test_a_stop_token_sampled_in_the_step_of_an_abort_still_ends_the_turn(folder):
    with served(folder) as (client, server):
        client.engine.swap(forcing_weights(client.engine.weight_shapes(), 77), 1, "keep")
        server.step_allowed = lambda: any(turn.to_abort for turn in server.running.values())
        client.engine.submit([request("r", [5], max_new_tokens=9, stop_token_ids=(77,))])
        until(lambda: server.running)
        client.engine.abort(["r"])
        result = client.wait("r")[0]
    assert (result.token_ids.tolist(), result.stop_reason) == ([77], StopReason.STOP)


def test_nothing_is_sampled_while_paused_and_a_turn_goes_on_after_it(folder):
    with served(folder, step_s=0.002) as (client, server):
        client.engine.submit([request("r", random_prompt(0, 9), seed=3, max_new_tokens=60)])
        until(lambda: server.running)
        time.sleep(0.03)
        client.engine.pause()
        before = client.engine.health().sampled_tokens
        assert 0 < before < 60
        assert not server.running
        client.engine.submit([request("later", random_prompt(0, 9), max_new_tokens=2)])
        time.sleep(0.1)
        assert client.engine.health().sampled_tokens == before
        client.engine.resume()
        paused, _ = client.wait("r", "later")
        whole = client.run([request("w", random_prompt(0, 9), seed=3, max_new_tokens=60)])[0]
    assert paused.token_ids.tolist() == whole.token_ids.tolist()


def test_score_is_the_models_own_also_while_paused_or_asleep(folder):
    tokens = random_prompt(4, 12)
    scored = dataclasses.replace(request("s", tokens[:1]))
    with served(folder) as (client, server):
        engine = client.engine
        with pytest.raises(EngineError, match="not paused"):
            engine.sleep()
        awake = engine.score(tokens)
        engine.pause()
        paused = engine.score(tokens)
        engine.submit([request("r", [5], max_new_tokens=2)])
        time.sleep(0.05)
        assert not server.running
        assert engine.score(tokens[:1]).shape == (0,)
        with pytest.raises(EngineError, match="score: token ids are"):
            engine.score(np.array([5, 99999], np.int32))
        engine.resume()
        assert len(client.wait("r")[0].token_ids) == 2
    model = hf_model(folder)
    result = type("Scored", (), {"token_ids": tokens[1:]})
    expected, _ = hf_logprobs(model, scored, result)
    np.testing.assert_allclose(awake, expected, atol=1e-5)
    np.testing.assert_allclose(paused, expected, atol=1e-5)


def test_closing_hands_every_turn_back_and_leaves_the_server_usable(folder):
    with served(folder, step_s=0.01) as (client, server):
        client.engine.submit([request("r", random_prompt(0, 9), max_new_tokens=900)])
        until(lambda: server.running)
        client.engine.pause()
        client.engine.close()
        assert client.wait("r")[0].stop_reason == StopReason.ABORT
        assert not server.running
        assert not server.is_paused
        with pytest.raises(EngineError, match="closed"):
            client.engine.submit([request("s", [5])])


# -- what goes wrong ----------------------------------------------------------------------------


def answering(status: int, **content: Any) -> Any:
    return lambda body: web.json_response(content, status=status)


def test_a_busy_server_is_asked_again(folder):
    with served(folder) as (client, server):
        server.faults.extend([answering(503, detail="queue full"), answering(429)])
        result = client.run([request("r", [5], max_new_tokens=3)])[0]
    assert (result.error, len(result.token_ids)) == ("", 3)


def spoilt(change: Any) -> Any:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        change(answer, answer["meta_info"])
        return answer

    return spoil


SPOILT = {
    "log-probs are missing": lambda answer, meta: meta.pop("output_token_logprobs"),
    "a log-prob is dropped": lambda answer, meta: meta["output_token_logprobs"].pop(),
    "a log-prob is NaN": lambda answer, meta: meta["output_token_logprobs"][1].__setitem__(
        0, float("nan")
    ),
    "a log-prob is null": lambda answer, meta: meta["output_token_logprobs"][0].__setitem__(
        0, None
    ),
    "log-probs are of other tokens": lambda answer, meta: answer["output_ids"].__setitem__(-1, 1),
    "no version": lambda answer, meta: [meta.pop("weight_version"), meta.pop("weight_versions")],
    "another version": lambda answer, meta: [
        meta.update(weight_version="7"), meta.pop("weight_versions")
    ],
    "an unknown reason": lambda answer, meta: meta["finish_reason"].update(type="bored"),
    "more tokens than asked for": lambda answer, meta: [
        answer["output_ids"].append(5), meta["output_token_logprobs"].append([-1.0, 5, None]),
        meta.update(completion_tokens=4),
    ],
    "no meta_info": lambda answer, meta: answer.pop("meta_info"),
}  # fmt: skip


LIKELY = {
    "none are told": lambda meta: meta.pop("output_top_logprobs"),
    "of other tokens": lambda meta: meta["output_top_logprobs"].append([[-1.0, 5, None]] * 2),
    "fewer than asked": lambda meta: meta["output_top_logprobs"][0].pop(),
    "a log-prob is null": lambda meta: meta["output_top_logprobs"][0][0].__setitem__(0, None),
}


@pytest.mark.parametrize("change", LIKELY.values(), ids=LIKELY)
def test_likeliest_tokens_are_told_whole_or_not_at_all(folder, change):
    with served(folder) as (client, server):
        server.spoil = spoilt(lambda answer, meta: change(meta))
        found = client.run([request("r", [5, 6], max_new_tokens=3, top=2)])[0]
        assert found.top is None
        is_told = change is not LIKELY["none are told"]
        assert ("output_top_logprobs" in found.error) == is_told
        assert len(found.token_ids) == (0 if is_told else 3)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT)
def test_an_answer_that_lacks_what_training_needs_fails_its_request_alone(
    folder, change, is_streamed
):
    with served(folder) as (client, server):
        server.spoil = spoilt(lambda a, m: m["finish_reason"] and change(a, m))
        sent = request("bad", [5, 6], max_new_tokens=3)
        bad = client.run([dataclasses.replace(sent, is_streamed=is_streamed)])[0]
        assert bad.error.startswith("request bad: ")
        assert len(bad.token_ids) == len(bad.logprobs) == 0
        server.spoil = lambda answer: answer
        assert client.run([request("good", [5, 6], max_new_tokens=3)])[0].error == ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (answering(400, error={"message": "no such thing"}), "answers 400: no such thing"),
        (answering(500, detail="out of memory"), "answers 500: out of memory"),
        (lambda body: web.Response(text="<html>"), "is no JSON"),
        (lambda body: web.Response(text="[]"), "must be an object"),
    ],
)
def test_what_a_server_refuses_fails_its_request_with_the_servers_words(folder, fault, told):
    with served(folder) as (client, server):
        server.faults.append(fault)
        error = client.run([request("r", [5], max_new_tokens=3)])[0].error
    assert error.startswith("request r: ")
    assert told in error


def test_a_server_that_never_answers_fails_the_request_at_its_deadline(folder):
    with served(folder, request_timeout_s=0.4, num_retries=0) as (client, server):
        server.step_allowed = lambda: False
        error = client.run([request("r", [5], max_new_tokens=3)])[0].error
        server.step_allowed = lambda: True
    assert error.startswith("request r: /generate: no answer from http://127.0.0.1:")


def test_a_server_of_another_kind_or_age_is_refused(folder):
    with scripted_server(folder, version="0") as server:
        server.info |= {"version": "0.4.10", "tp_size": 2}
        with pytest.raises(EngineError, match=r"SGLang 0\.4\.10.*tp_size is 2"):
            SglangGenerationEngine(folder, SglangGenerationConfig(url=server.url))


def test_weights_of_unknown_origin_are_replaced_by_the_models_own(folder, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=5, tie_word_embeddings=False)
    with scripted_server(other, version="default") as server:
        engine = SglangGenerationEngine(folder, SglangGenerationConfig(url=server.url), version=3)
        tokens = random_prompt(0, 9)
        scored = engine.score(tokens)
        engine.close()
    turn = request("s", tokens[:1])
    expected, _ = hf_logprobs(hf_model(folder), turn, type("S", (), {"token_ids": tokens[1:]}))
    np.testing.assert_allclose(scored, expected, atol=1e-5)


def test_weights_that_somebody_else_loads_end_the_engine(folder):
    with served(folder) as (client, server):
        server.version = "99"
        until(lambda: is_over(client.engine))
        with pytest.raises(EngineError, match=r"at version 99, must be at 0: another client"):
            client.engine.health()


def is_over(engine: Any) -> bool:
    try:
        engine.health()
    except EngineError:
        return True
    return False


# -- a server of our own ------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose `-m sglang.launch_server` is the scripted server."""
    return write_interpreter(tmp_path)


def test_a_server_is_started_given_weights_by_broadcast_put_to_sleep_and_ended(folder, python):
    config = SglangGenerationConfig(
        python=python, weight_path="distributed", group_backend="gloo", bucket_bytes=2**20,
        memory_saver=True, args={"step_s": 0.004},
    )  # fmt: skip
    engine = SglangGenerationEngine(folder, config, version=4)
    client = Served(engine)
    client.start()
    engine.submit([request("r", random_prompt(0, 20), max_new_tokens=60)])
    for version in (5, 6):
        time.sleep(0.05)
        engine.swap(forcing_weights(engine.weight_shapes(), 40 + version), version, "recompute")
    result = client.wait("r")[0]
    forced = result.versions > 4
    assert (result.versions[0], result.versions[-1]) == (4, 6)
    assert (result.token_ids[forced] == 40 + result.versions[forced]).all()

    engine.pause()
    engine.sleep()
    with pytest.raises(EngineError, match="wake it first"):
        engine.resume()
    assert len(engine.score(random_prompt(0, 9))) == 8  # the server refuses it asleep
    engine.wake()
    engine.resume()
    assert len(client.run([request("s", [5], max_new_tokens=2)])[0].token_ids) == 2

    process = server_process(engine)
    engine.close()
    until(lambda: not is_alive(process))


def test_a_server_that_dies_is_told_by_health_and_by_every_turn(folder, python):
    config = SglangGenerationConfig(python=python, args={"step_s": 0.01}, num_retries=1)
    engine = SglangGenerationEngine(folder, config)
    client = Served(engine)
    client.start()
    engine.submit([request(f"r{i}", [5, 6], max_new_tokens=900) for i in range(3)])
    until(lambda: engine.health().num_running == 3)
    os.kill(server_process(engine), signal.SIGKILL)
    for result in client.wait("r0", "r1", "r2"):
        assert result.error.startswith(f"request {result.request_id}: ")
    until(lambda: is_over(engine))
    with pytest.raises(EngineDied, match=r"the server ended with code 137 \(SIGKILL\)"):
        engine.health()
    engine.close()


def test_a_server_that_does_not_start_is_told_with_its_last_words(folder, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho unrecognized arguments: $7 1>&2\nexit 2\n")
    script.chmod(0o755)
    with pytest.raises(EngineDied, match=r"ended with code 2\. The last(.|\n)*arguments: --port"):
        SglangGenerationEngine(folder, SglangGenerationConfig(python=str(script)))


def test_a_killed_replica_takes_its_server_along():
    owner = subprocess.Popen(
        [sys.executable, "-c",
         "import time\n"
         "from areal_ray.engines.sglang_server import SglangServer\n"
         "server = SglangServer(['sh', '-c', 'echo $$; sleep 600 & wait'])\n"
         "while not server.log.read_text().endswith('\\n'): time.sleep(0.05)\n"
         "print(server.log.read_text(), end='', flush=True)\n"
         "time.sleep(600)"],
        stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert owner.stdout is not None
    process = int(owner.stdout.readline())
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    assert is_alive(process)
    assert len(children) == 1
    owner.kill()
    owner.wait()
    until(lambda: not is_alive(process) and not is_alive(int(children[0])), 20.0)


def server_process(engine: Any) -> int:
    """The process that listens."""
    return server_below(engine._server._guard.pid)


def test_pause_from_the_engines_own_thread_does_not_wait_for_itself(folder):
    with served(folder, step_s=0.003) as (client, server):
        client.run_until("first", [
            request("first", [5], max_new_tokens=2), request("second", [5], max_new_tokens=300)
        ])  # fmt: skip
        until(lambda: server.is_paused and not server.running)
        assert client.engine.health().num_running == 1
        client.engine.resume()
        assert len(client.wait("second")[0].token_ids) == 300
