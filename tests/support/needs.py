"""Marks of tests that need an optional package."""

from importlib.util import find_spec

import pytest

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'areal-ray[deepspeed]'",
)
