"""Random seeds that follow from the run's seed and a name, the same on every machine."""

import hashlib


def derive_seed(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the thing called `names` in a run of `seed`.

    Python's own hash() differs between processes; two things with other names never share a
    stream by accident.
    """
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
