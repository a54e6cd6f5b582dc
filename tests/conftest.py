"""Settings of every test: few threads, since tests share the cores, and repeatable draws."""

import os

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
