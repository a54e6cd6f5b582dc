"""Rows that are too long are left out where the recipe says so, else told before they train."""

from pathlib import Path

import pytest

from areal_ray.engines.preference import PreferenceConfig
from areal_ray.engines.sft import SftConfig
from areal_ray.errors import DataError
from areal_ray.runtime.pair_source import PairSource
from areal_ray.runtime.sft_source import SftSource
from tests.support.tiny_models import write_tiny_model

ROWS = """
ASKED = [{"role": "user", "content": "Hi"}]

def said(long=1):
    for text in ("yes", "no", "y" * long):
        yield [*ASKED, {"role": "assistant", "content": text}]

def pairs(long=1):
    for text in ("yes", "no", "y" * long):
        yield ASKED, text, "never"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)
    (made / "long_rows.py").write_text(ROWS)
    return made


def lengths(folder: Path, kind: str, **fields: object) -> list[int]:
    """Of the rows that train, the longer answer of a pair."""
    source = {"steps": 1, "batch_size": 4, **fields}
    if kind == "sft":
        config = SftConfig(phases=({"source": "long_rows:said", **source},))
        examples = SftSource(config, str(folder), roots=[str(folder)]).batch(0, 0)
        return [len(example.token_ids) for example in examples]
    pairs = PreferenceConfig(source="long_rows:pairs", **source)
    batch = PairSource(pairs, str(folder), roots=[str(folder)]).batch(0)
    return [max(len(p.chosen.token_ids), len(p.rejected.token_ids)) for p in batch]


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_longer_rows_are_left_out_and_counted(folder, kind, caplog):
    long = {"long": 50}
    every, few = (
        lengths(folder, kind, args={"long": 2}),
        lengths(folder, kind, args=long, max_tokens=40),
    )
    assert len(every) == len(few) == 4
    assert max(few) <= 40
    assert "1 of 3" in caplog.text
    with pytest.raises(DataError, match=r"gave 3 .*max_tokens = 3"):
        lengths(folder, kind, args=long, max_tokens=3)


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_a_row_beyond_the_model_is_told_by_its_place_and_the_way_out(folder, kind):
    with pytest.raises(DataError, match=r"row 2: has \d+ tokens; must have at most 64.*max_tokens"):
        lengths(folder, kind, args={"long": 200})
