"""A table of how far our mathematics lies from that of public libraries.

    python -m benchmarks.parity [--peers FOLDER] [--markdown]

`benchmarks.parity.peers` says how to install them; whatever is missing is named and left out. A
figure is the largest |ours - theirs| over values and gradients, in units of the largest of either,
on the same random batch: 24 sequences of 6 to 40 tokens with gaps. Exit code 1: something that
must agree lies further apart than 1e-5 in float64 or 1e-4 in float32.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.parity.advantages import advantage_cases
from benchmarks.parity.case import Case, distance
from benchmarks.parity.corrections import correction_cases
from benchmarks.parity.estimates import estimate_cases
from benchmarks.parity.inputs import make_inputs
from benchmarks.parity.peers import PACKAGES, Peers
from benchmarks.parity.policy import policy_cases
from benchmarks.parity.preference import preference_cases

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""More than rounding: verl and OpenRLHF add 1e-8 to counts or variances; SkyRL's ratios,
OpenRLHF's KL and trl's temperatures of SAPO are float32 whatever they are given."""


def cases(peers: Peers) -> Iterator[Case]:
    """In the order of the table."""
    yield from policy_cases(peers)
    yield from correction_cases(peers)
    yield from advantage_cases(peers)
    yield from estimate_cases(peers)
    yield from preference_cases(peers)


def main() -> int:
    """Prints the table; 1 if something that must agree does not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder of `pip install --target`")
    parser.add_argument("--markdown", action="store_true", help="as it stands in the docs")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    peers = Peers(given.peers)
    batches = {dtype: make_inputs(dtype) for dtype in TOLERANCE}
    rows, wrong = [], False
    notes: dict[str, list[str]] = {}
    for case in cases(peers):
        found = {dtype: distance(case.run(batch)) for dtype, batch in batches.items()}
        is_wrong = not case.differs and any(found[d] > TOLERANCE[d] for d in found)
        mark = "differs" if case.differs else "WRONG" if is_wrong else ""
        rows.append((case.what, case.peer, *(f"{found[d]:.1e}" for d in found), mark))
        if case.differs:
            notes.setdefault(f"{case.what} (%s): {case.differs}.", []).append(case.peer)
        wrong |= is_wrong
    _print(rows, notes, peers, given.markdown)
    return 1 if wrong else 0


def _print(
    rows: list[tuple[str, ...]], notes: dict[str, list[str]], peers: Peers, is_markdown: bool
) -> None:
    if is_markdown:
        _print_markdown(rows, [name for name in PACKAGES if name in peers.versions])
    else:
        rows = [("what", "peer", "float64", "float32", ""), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print("\nDiffer on purpose:\n")
    for note, named in notes.items():
        print(f"- {note % ', '.join(named)}")
    print("\n" + ", ".join(f"{name} {number}" for name, number in peers.versions.items()))
    for name in PACKAGES:
        if name in peers.missing:
            print(f"{name} is left out: {peers.missing[name]} (see benchmarks/parity/peers.py)")


def _print_markdown(rows: list[tuple[str, ...]], names: list[str]) -> None:
    """A row for each subject, a column for each peer: float64 / float32."""
    table: dict[str, dict[str, str]] = {}
    for what, peer, double, single, mark in rows:
        table.setdefault(what, {})[peer] = f"{mark} {double} / {single}".strip()
    print("| |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for what, found in table.items():
        print(f"| {what} |", " | ".join(found.get(name, "") for name in names), "|")


if __name__ == "__main__":
    sys.exit(main())
