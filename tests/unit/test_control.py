"""Requests to a run that goes on, by files in its folder."""

import json
import threading
from pathlib import Path

import pytest

from areal_ray.cli import main
from areal_ray.control import Requests, ask_to_scale, read_sizes
from areal_ray.errors import DeadlineExceeded, PlacementError, RecipeError
from areal_ray.run_folder import RunFolder


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "learner=2",
            "'learner' cannot be scaled while a run goes on; must be one of agent, gateway",
        ),
        ("agent", "must read agent=COUNT"),
        ("agent=0", "from 1 to"),
        ("rollout=0", "from 1 to"),
        ("gateway=two", "must read gateway=COUNT, COUNT a whole number from 1 to"),
        ("agent=-1", "from 1 to"),
        ("agent=1e9", "must read agent=COUNT"),
        ("agent=99999999999", "from 1 to"),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_what_can(word, told):
    with pytest.raises(RecipeError, match=told):
        read_sizes([word])
    assert read_sizes(["agent=8", "reward=2"]) == {"agent": 8, "reward": 2}
    assert read_sizes(["rollout=3", "gateway=2"]) == {"rollout": 3, "gateway": 2}


def test_a_run_that_does_not_go_on_is_not_scaled(tmp_path, capsys):
    RunFolder.claim(tmp_path / "over", "kind: rl\n").release()
    with pytest.raises(SystemExit) as ended:
        main(["scale", str(tmp_path / "over"), "agent=2"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "does not go on; nothing was scaled" in told
    assert "areal-ray resume over agent.replicas=2" in told


@pytest.mark.parametrize("text", ["kind: sft\n", "kind: eval\n", "kind: distill\nsft: {}\n"])
def test_a_run_that_looks_for_no_requests_is_told_at_once(tmp_path, text):
    held = RunFolder.claim(tmp_path / "run", text)
    with pytest.raises(RecipeError, match="has no actors that can be scaled while it goes on"):
        ask_to_scale(held.path, {"agent": 8}, patience_s=60)
    held.release()
    assert not (held.path / "control").exists()


def test_a_role_is_given_one_count():
    with pytest.raises(RecipeError, match="agent is given twice"):
        read_sizes(["agent=2", "rollout=1", "agent=3"])


@pytest.mark.parametrize("answer", [{"done": "agent: 1 -> 8"}, {"error": "no room"}])
def test_a_request_is_seen_once_answered_and_leaves_nothing_behind(tmp_path, answer):
    held = RunFolder.claim(tmp_path / "run", "kind: rl\n")
    requests, seen = Requests(held.path), []
    told: list[object] = []

    def ask() -> None:
        try:
            told.append(ask_to_scale(held.path, {"agent": 8}, patience_s=60))
        except PlacementError as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        for name, sizes in requests.new():
            seen.append(sizes)
            requests.answer(name, **answer)
        asking.join(0.01)
    held.release()
    assert seen == [{"agent": 8}]
    assert str(told[0]) == next(iter(answer.values()))
    assert isinstance(told[0], PlacementError) == ("error" in answer)
    assert list((held.path / "control").iterdir()) == []


def test_a_run_that_does_not_answer_is_waited_for_so_long_and_the_request_taken_back(tmp_path):
    held = RunFolder.claim(tmp_path / "run", "kind: rl\n")
    with pytest.raises(DeadlineExceeded, match=r"was not done within 0\.1 s"):
        ask_to_scale(held.path, {"agent": 8}, patience_s=0.1)
    held.release()
    assert list((held.path / "control").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"learner": 2}', '{"agent": "x"}', "7"])
def test_a_request_that_makes_no_sense_is_answered_and_harms_nobody(tmp_path: Path, text: str):
    folder = tmp_path / "control"
    folder.mkdir()
    (folder / "odd.asked.json").write_text(text)
    requests = Requests(tmp_path)
    assert list(requests.new()) == list(requests.new()) == []
    assert "error" in json.loads((folder / "odd.answered.json").read_text())
