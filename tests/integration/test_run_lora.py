"""Whole runs under adapters: they alone travel and are saved, and a break changes nothing."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_ray.telemetry.rows import read_rows
from tests.support.whole_runs import (
    Runs,
    assert_books_balance,
    episodes_of,
    events_of,
    pid_of,
    staleness_of,
    steps_of,
    until_step,
)

LORA = ("model.lora={rank: 4, alpha: 16}", "learner.optimizer.lr=0.02")
SLOW = (
    "agent.run=tests.support.digits:slow_tool",
    "steps=8",
    "rollout.on_weight_update=recompute",  # kept keys and values would be of older adapters
)
SAME_NATS = 1e-6
"""Between rollout engine and learner where both have the same adapters."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]


def assert_sampled_as_trained(folder: Path) -> None:
    """On tokens of the learner's own version, engine and learner say the same log-probs."""
    fresh = [row for row in rows_of(folder) if row["mismatch/fresh_tokens"]]
    assert fresh
    assert max(abs(row["mismatch/kl_nats"]) for row in fresh) < SAME_NATS


def adapter_bytes(checkpoint: Path) -> int:
    tensors = load_file(checkpoint / "adapter/adapter_model.safetensors")
    return sum(t.nbytes for t in tensors.values())


def test_adapters_alone_travel_and_the_model_that_is_left_has_them_in_it(runs: Runs) -> None:
    summary = runs.run("lora", *LORA, "admission.max_head_offpolicyness=0")
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 6, 6)
    folder = runs.folder / "lora"
    assert_books_balance(folder)
    assert_sampled_as_trained(folder)
    whole = sum(t.nbytes for t in load_file(runs.folder / "tiny/model.safetensors").values())
    own = adapter_bytes(folder / "model")
    assert {row["publish/bytes"] for row in rows_of(folder)} == {own}
    assert own < whole / 8
    last = folder / "checkpoints/step-000006"
    assert adapter_bytes(last) == own
    assert not list(last.glob("*.safetensors"))
    start, made = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (runs.folder / "tiny", folder / "model")
    )
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        assert (start(ids).logits - made(ids).logits).abs().max() > 0.1
    same = dict(start.named_parameters())
    moved = {n for n, t in made.named_parameters() if not torch.equal(t, same[n])}
    assert moved == {n for n in same if "_proj." in n}


@pytest.mark.extended
def test_a_stopped_run_goes_on_with_its_adapters_over_the_model_it_began_with(runs: Runs) -> None:
    handle = runs.start("lora-broken", *LORA, *SLOW)
    until_step(handle, 3)
    handle.stop()
    before = handle.wait(120)
    assert (before.outcome, before.version) == ("stopped", before.steps)
    resumed = runs.run("lora-broken", *LORA, *SLOW, resume=True)
    folder = runs.folder / "lora-broken"
    assert (resumed.outcome, resumed.steps, resumed.version) == ("finished", 8, 8)
    assert steps_of(folder) == list(range(1, 9))
    assert_sampled_as_trained(folder)
    error = runs.failure("lora-broken", *SLOW, "steps=9", resume=True)
    assert "holds adapters, and model.lora is null" in str(error)
    error = runs.failure("lora-broken", *LORA, "model.lora.rank=8", "steps=9", resume=True)
    assert "Resume with the model.lora" in str(error) or "wrong shape" in str(error)


@pytest.mark.extended
def test_a_replica_that_was_killed_comes_back_with_the_model_and_the_last_adapters(
    runs: Runs,
) -> None:
    handle = runs.start("lora-killed", *LORA, *SLOW)
    until_step(handle, 3)
    os.kill(pid_of("lora-killed", "rollout-0"), signal.SIGKILL)
    summary = handle.wait(250)
    folder = runs.folder / "lora-killed"
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 8, 8)
    assert "rollout-0" in events_of(folder)
    assert_sampled_as_trained(folder)
    assert max(set().union(*map(staleness_of, episodes_of(folder)))) <= 2
