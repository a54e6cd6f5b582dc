"""Settings of every test: few threads, since tests share the cores, and repeatable draws.

And the order of files: what takes long begins first, so that no worker ends long after the others.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(name, value)
os.environ["TEST_RUN"] = str(os.getpid())
"""Tells the processes of this pytest from those of another one beside it."""

settings.register_profile(
    "tests",
    deadline=None,  # the cores are shared: time says nothing about the code
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

LONG_FILES = (
    *("integration/test_objectives_learn.py", "chaos/test_gateway_kills.py"),
    *("chaos/test_run_kills.py", "integration/test_run_resume.py"),
    *("integration/test_run_ranks.py", "chaos/test_run_failures.py"),
    *("integration/test_command_line.py", "integration/test_vllm_generation.py"),
    *("integration/test_scaling.py", "integration/test_sglang_conformance.py"),
    *("chaos/test_publish_kills.py", "chaos/test_publish_canaries.py"),
    *("integration/test_publish_transports.py", "integration/test_recipes_smoke.py"),
    *("integration/test_streaming.py", "integration/test_run_handle.py"),
    *("integration/test_agent_programs.py", "integration/test_train_conformance.py"),
    *("integration/test_group_signals.py", "integration/test_publish.py"),
    *("integration/test_serve_replicas.py", "integration/test_agent_actor.py"),
    *("integration/test_placement_on_ray.py", "integration/test_run_nodes.py"),
    *("integration/test_sglang_generation.py", "integration/test_reward_actor.py"),
    *("integration/test_serve_upstream.py", "integration/test_run_lora.py"),
    *("integration/test_run_versions.py", "integration/test_ray_jobs.py"),
    *("integration/test_run_bounds.py", "integration/test_train_conformance_deepspeed.py"),
    *("integration/test_run_distillation.py", "integration/test_loop_failures.py"),
    *("chaos/test_engine_deaths.py", "chaos/test_publish_schedules.py"),
    *("integration/test_vllm_lora.py", "integration/test_run_staleness.py"),
)
"""The longest first; each takes half a minute or more on two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; xdist hands files out in this order (--no-loadscope-reorder)."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONG_FILES)}
    gone = [str(path) for path in places if not path.is_file()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: LONG_FILES names what is not there: {gone}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
