"""What a run's ledger tells of the groups and sessions behind each version."""

import json
import re

import pytest

from areal_ray.cli import main
from areal_ray.core.journal import LedgerJournal, resumption
from areal_ray.core.lineage import ShapingGroup, lineage_of
from areal_ray.errors import DataError


def step(number, *groups, sampled_by=(0, 0), sessions=()):
    """Events of one step that trains on groups of two episodes."""
    fields = {
        "tokens": 7,
        "rewards": [1.0, None],
        "oldest_version": sampled_by[0],
        "newest_version": sampled_by[1],
        **(
            {"sessions": list(sessions), "session_group": "g", "task": "apples"} if sessions else {}
        ),
    }
    return [
        *({"event": "committed", "group": group, **fields} for group in groups),
        {"event": "trained", "step": number, "groups": list(groups)},
    ]


def rolled_back(number, to, reason="accuracy 0.1 is below 0.5"):
    return {"event": "rolled_back", "step": number, "to": to, "reason": reason}


def shaped_by(events, version):
    return [record.version for record in lineage_of(events, version).shaped_by]


def test_a_version_is_shaped_by_its_step_and_those_of_all_its_ancestors():
    events = [
        *step(1, "0/a/0"),
        *step(2, "0/b/0", "0/c/0", sampled_by=(0, 1), sessions=("s1", "s2")),
    ]
    found = lineage_of(events, 2)
    group = ShapingGroup("0/b/0", (1.0, None), 7, (0, 1), ("s1", "s2"), "apples")
    assert found.record.groups[0] == group
    assert (found.record.parent, found.record.restored) == (1, None)
    assert [record.version for record in found.shaped_by] == [2, 1, 0]


def test_what_was_rolled_back_is_in_no_later_version_and_is_marked():
    events = [*step(1, "a"), *step(2, "b"), *step(3, "c"), rolled_back(3, to=1), *step(4, "d")]
    assert shaped_by(events, 3) == [1, 0]
    assert shaped_by(events, 4) == [4, 1, 0]
    assert shaped_by(events, 2) == [2, 1, 0]  # while it was in force
    undone = [lineage_of(events, version).record.undone_by for version in range(5)]
    assert undone == [None, None, 3, 3, None]
    record = lineage_of(events, 3).record
    assert (record.restored, [group.group for group in record.groups]) == (1, ["c"])
    assert "below 0.5" in record.refusal


def test_steps_that_a_resumption_forgot_are_forgotten_with_their_rollback():
    before = [*step(1, "a"), *step(2, "b"), rolled_back(2, to=0)]
    events = [*before, resumption(1, 1), *step(2, "x")]
    assert lineage_of(events, 2).record.groups[0].group == "x"
    assert shaped_by(events, 2) == [2, 1, 0]
    with pytest.raises(DataError, match="has 0 to 2"):
        lineage_of(events, 3)


@pytest.fixture
def run(tmp_path):
    """A run folder with a ledger."""
    folder = tmp_path / "runs" / "support-bot"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("kind: online\n")
    journal = LedgerJournal(folder / "journal")
    for event in [*step(1, "0/slot-0/0", sessions=("ses_1", "ses_2")), rolled_back(1, to=0)]:
        journal.append(event)
    journal.close()
    return folder


def test_lineage_is_told_as_text_and_as_json(run, capsys):
    where = ["--fileroot", str(run.parent)]
    main_ends(["lineage", "1", *where])
    told = capsys.readouterr().out
    assert "of version 0 again: accuracy 0.1 is below 0.5" in told
    assert re.search(r"0/slot-0/0 +apples .* ses_1 ses_2", told)
    assert "1 -" in told  # rewards, one of them missing
    main_ends(["lineage", "1", "--run", "support-bot", "--json", *where])
    record = json.loads(capsys.readouterr().out)["record"]
    assert record["groups"][0]["sessions"] == ["ses_1", "ses_2"]
    assert record["undone_by"] == 1


def test_a_version_that_never_was_is_refused_with_those_there_are(run, capsys):
    main_ends(["lineage", "9", "--run", str(run)], code=2)
    assert "the run has 0 to 1" in capsys.readouterr().err


def main_ends(words, code=0):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert (end.value.code or 0) == code
