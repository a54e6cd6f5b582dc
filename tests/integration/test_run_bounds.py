"""Runs whose new weights break a bound: no rollout gets them, and the good ones come back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal_ray import launch
from areal_ray.errors import PromotionRefused
from areal_ray.run_listing import read_lineage
from areal_ray.telemetry.rows import read_rows
from recipes.online.sessions import finish, start, tell
from tests.support.online import RECIPE as ONLINE
from tests.support.online import told
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    assert_books_balance,
    episodes_of,
    events_of,
    steps_of,
    until,
)

KEEP_ALL = ("checkpoint.every_steps=1", "checkpoint.keep=9", "evaluation.before=false")
GATE = (
    "evaluation.tasks.source=tests.support.digits:held_out",
    "reward.score=tests.support.digits:falls",
    "bounds.gate={max_drop: 0.2}",
)

FAR = (
    "steps=3",
    "reference.path=null",
    "objective.kl={kl_ctl: 0.000001, estimator: k3, where: loss}",
    "bounds.max_kl_nats=0.0000001",
    "learner.optimizer.lr=0.01",
)


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Of the checkpoint after a step."""
    return load_file(folder / f"checkpoints/step-{step:06d}/model.safetensors")


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def state_at(folder: Path, step: int) -> dict:
    """Optimizer and schedule of the checkpoint after a step."""
    (file,) = (folder / f"checkpoints/step-{step:06d}").glob("*.pt")
    return torch.load(file, weights_only=True)


def test_a_version_that_scores_worse_is_not_promoted_and_the_run_goes_on_from_the_good_one(
    runs: Runs,
) -> None:
    summary = runs.run("falls", *KEEP_ALL, *GATE, "reward.args.versions=[3]")
    folder = runs.folder / "falls"
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 6, 6)
    assert_books_balance(folder)
    good, restored = weights_at(folder, 2), weights_at(folder, 3)
    assert are_equal(restored, good)
    assert not are_equal(weights_at(folder, 1), good)
    assert not are_equal(weights_at(folder, 4), good)
    assert state_at(folder, 3)["steps_taken"] == state_at(folder, 2)["steps_taken"] == 2
    assert state_at(folder, 4)["steps_taken"] == 3
    assert "step 3: what it made is not promoted: held-out accuracy is 0.000" in events_of(folder)
    rows = list(read_rows(folder / "metrics.jsonl"))
    refused = {r["step"]: r["bounds/refused_versions"] for r in rows if r["kind"] == "step"}
    assert refused == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 0}
    assert [r["version"] for r in rows if r["kind"] == "eval"] == [0, 1, 2, 4, 5, 6]
    # The fleet sampled under version 3, which has the good weights.
    assert 3 in {t["version"] for e in episodes_of(folder) for t in e["tokens"]}
    third, last = read_lineage(folder, 3), read_lineage(folder, 6)
    assert (third.record.restored, third.record.undone_by) == (2, 3)
    assert len(third.record.groups) == 4
    assert [record.version for record in last.shaped_by] == [6, 5, 4, 2, 1, 0]


@pytest.mark.extended
def test_refusals_in_a_row_end_the_run_with_the_reason(runs: Runs) -> None:
    how = ("reward.args.versions=[1,2,3,4,5,6]", "bounds.max_refusals=2")
    error = runs.failure("refused", *KEEP_ALL, *GATE, *how)
    assert isinstance(error, PromotionRefused)
    assert "step 2: what it made is not promoted" in str(error)
    assert "refusal 2 in a row" in str(error)


@pytest.mark.extended
def test_weights_too_far_from_the_starting_model_are_left_for_those_before(runs: Runs) -> None:
    """What step 1 made is found to be too far off by step 2, which so goes back to the start."""
    summary = runs.run("far", *KEEP_ALL[:2], *FAR)
    folder = runs.folder / "far"
    assert (summary.outcome, summary.version) == ("finished", 3)
    begun = load_file(runs.folder / "tiny/model.safetensors")
    assert not are_equal(weights_at(folder, 1), begun)
    assert are_equal(weights_at(folder, 2), begun)
    assert "KL from the reference model is" in events_of(folder)
    ledger = (folder / "journal/ledger.jsonl").read_text(encoding="utf-8").splitlines()
    undone = [e for e in map(json.loads, ledger) if e["event"] == "rolled_back"]
    assert [(e["step"], e["to"]) for e in undone] == [(2, 0)]


LORA = ("model.lora={rank: 4, alpha: 16}", "learner.optimizer.lr=0.02")
RANKS = ("learner.ranks=2", "learner.engine={kind: fsdp}")
BY_WAY = {
    "store": ("weights.transport=object_store",),
    "disk": ("weights.transport=disk",),
    "ranks": RANKS,
    "adapters": LORA,
    "adapters-disk": (*LORA, "weights.transport=disk"),
    "ranks-adapters": (*RANKS, *LORA),
}


def trained_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """What was trained of the checkpoint after a step: the adapters, where there are some."""
    kept = folder / f"checkpoints/step-{step:06d}"
    adapters = kept / "adapter/adapter_model.safetensors"
    return load_file(adapters if adapters.is_file() else kept / "model.safetensors")


@pytest.mark.extended
@pytest.mark.parametrize("way", BY_WAY)
def test_whatever_way_weights_travel_what_is_refused_reaches_no_rollout(
    runs: Runs, way: str
) -> None:
    name = f"falls-{way}"
    # With the old cache, tokens after a swap would not be those of the new weights alone.
    anew = "rollout.on_weight_update=recompute"
    how = ("steps=4", "reward.args.versions=[2]", anew, *BY_WAY[way])
    summary = runs.run(name, *KEEP_ALL, *GATE, *how)
    folder = runs.folder / name
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 4, 4)
    assert_books_balance(folder)
    assert are_equal(trained_at(folder, 2), trained_at(folder, 1))
    assert not are_equal(trained_at(folder, 3), trained_at(folder, 2))
    assert "step 2: what it made is not promoted: held-out accuracy is 0.000" in events_of(folder)
    # The rollouts sample as the learner's restored weights do, under the refused version's number.
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["bounds/refused_versions"] for row in rows] == [0, 1, 0, 0]
    assert max(abs(row["mismatch/kl_nats"]) for row in rows if row["mismatch/fresh_tokens"]) < 1e-6
    assert (summary.publish.count, summary.publish.differing) == (4, 0)
    assert read_lineage(folder, 2).record.restored == 1


@pytest.mark.extended
@pytest.mark.parametrize("way", ["store", "ranks"])
def test_too_far_from_the_reference_goes_back_whatever_way_weights_travel(
    runs: Runs, way: str
) -> None:
    name = f"far-{way}"
    summary = runs.run(name, *KEEP_ALL[:2], *FAR, *BY_WAY[way])
    folder = runs.folder / name
    assert (summary.outcome, summary.version) == ("finished", 3)
    begun = load_file(runs.folder / "tiny/model.safetensors")
    assert not are_equal(trained_at(folder, 1), begun)
    assert are_equal(trained_at(folder, 2), begun)


@pytest.mark.extended
def test_a_step_waits_until_enough_sessions_have_a_reward(runs: Runs) -> None:
    """Each group has all that a step needs but the number of rewards."""
    handle = launch(
        ONLINE,
        [
            "name=rewarded",
            f"cluster.fileroot={runs.folder}",
            f"model={{path: {runs.folder}/tiny}}",
            "steps=1",
            "admission={groups_per_step: 1, n_samples: 2, min_scored_samples: 1}",
            "bounds.min_rewarded_sessions=3",
            "gateway.sessions.feedback_timeout_s=0",
            "learner.ppo_n_minibatches=1",
            "telemetry.console=off",
        ],
    )
    try:
        access = handle.wait_for_gateway(PATIENCE_S)
        for lacking in ("1 of 1 groups and 3", "0 of 1 groups and 2", "0 of 1 groups and 1"):
            until(lambda text=lacking: text in _awaited(handle), lacking)
            assert steps_of(handle.folder) == []
            one, other = start(access.url, access.admin_key, lacking, group_size=2)
            assert told(access.url, one)
            assert told(access.url, other)
            finish(access.url, one, reward=1.0)
            tell(access.url, "end_session", other["api_key"], {})
        assert handle.wait(PATIENCE_S).outcome == "finished"
    finally:
        handle.stop()
    assert_books_balance(handle.folder)
    assert read_lineage(handle.folder, 1).record.groups[0].rewards == (1.0, None)


def _awaited(handle: Any) -> str:
    """What the learner waits for."""
    return str(handle.status().status.get("waits", {}).get("learner"))
