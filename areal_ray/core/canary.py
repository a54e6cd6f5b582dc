"""The canary of a publish: what a replica proves after a swap, and which votes commit a version.

Free of torch and of Ray: the arithmetic alone. The learner computes a `Probe` under the weights it
sends; a replica that has swapped them in compares (`compare`) what its engine gives for the same
tokens; `is_carried` counts the votes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXACT_TYPES = frozenset({"float32", "float64"})
"""Forward passes in these differ by rounding alone, whatever the kernels."""

EXACT_TOLERANCE_NATS = 0.01
REDUCED_TOLERANCE_NATS = 1.0
"""Of one token's log-prob; see docs/architecture.md for what was measured."""

_SEED = 20


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed prompt, and what the learner gives for it under the weights that were sent."""

    token_ids: NDArray[np.int32]
    """[P]"""
    logprobs: NDArray[np.float32]
    """[P - 1] of each token but the first, at temperature 1."""
    dtypes: tuple[str, ...]
    """Types that the learner computes and sends in, as torch names them."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The learner's account of what it sent."""

    digests: list[str]
    """Of each bucket."""
    probe: Probe | None = None
    """Under these weights; None where none is taken."""


@dataclass(frozen=True, slots=True)
class Check:
    """What a replica has to prove after a swap."""

    probe: Probe | None = None
    """None = log-probs are not compared."""
    tensors: bool = True
    """Compare each live tensor with what arrived, where the engine can."""
    tolerance_nats: float | None = None
    """Of any token of the probe; None = by the types that both sides compute in."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a replica found when it checked its own live weights."""

    difference: str = ""
    """Why these are not the learner's weights; empty = they are, as far as was checked."""
    seconds: float = 0.0
    """The check took; the engine sampled meanwhile."""
    largest_nats: float | None = None
    """Largest difference of a log-prob between engine and learner; None where not compared."""
    mean_nats: float | None = None
    """Mean of the absolute differences."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """One replica's account of a swap."""

    idle_s: float
    """Seconds its engine stood still."""
    proof: Proof


def probe_tokens(vocab_size: int, count: int) -> NDArray[np.int32]:
    """[count] token ids, the same for the same arguments on every machine, all over the vocabulary.

    Random rather than a text: rows of the embedding far apart take part, and no tokenizer does.
    """
    return np.random.default_rng(_SEED).integers(0, vocab_size, count).astype(np.int32)


def compare(
    probe: Probe, logprobs: NDArray[np.float32], dtype: str, tolerance_nats: float | None
) -> Proof:
    """What an engine's log-probs of a probe prove.

    Args:
        probe: With the learner's own.
        logprobs: [P - 1] the engine's.
        dtype: Type that the engine computes in; empty = unknown.
        tolerance_nats: Of any token; None = by the two types.
    """
    if logprobs.shape != probe.logprobs.shape:
        told = f"the engine gave {logprobs.shape} log-probs of the probe, the learner"
        return Proof(f"{told} {probe.logprobs.shape}")
    if not np.isfinite(probe.logprobs).all():
        return Proof()  # weights that diverged: sampling itself names that cause
    apart = np.abs(logprobs.astype(np.float64) - probe.logprobs)
    apart[~np.isfinite(apart)] = np.inf
    worst = int(apart.argmax())
    limit = tolerance_nats or _tolerance_nats(*probe.dtypes, dtype)
    difference = ""
    if apart[worst] > limit:
        difference = (
            f"the log-prob of token {worst + 1} of the probe is {logprobs[worst]:.4g} here and "
            f"{probe.logprobs[worst]:.4g} at the learner; they may differ by {limit:g}"
        )
    return Proof(difference, largest_nats=float(apart[worst]), mean_nats=float(apart.mean()))


def _tolerance_nats(*dtypes: str) -> float:
    return EXACT_TOLERANCE_NATS if EXACT_TYPES.issuperset(dtypes) else REDUCED_TOLERANCE_NATS


def is_carried(num_equal: int, num_different: int) -> bool:
    """Whether a version may be committed: most of those who checked agree.

    The learner is one of them, since each proof compares with it: a single replica that differs
    carries nothing, one that agrees carries it against one that differs.
    """
    return num_equal > 0 and num_equal + 1 > num_different
