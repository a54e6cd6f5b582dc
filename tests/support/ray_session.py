"""The one local Ray that all tests of a pytest run share."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from areal_ray.runtime.cluster import start_or_join


@contextmanager
def shared_ray() -> Iterator[None]:
    """A real one-node Ray; whoever starts it also ends it. CPUs are oversubscribed on purpose.

    Without a runtime environment: actors then take the workers that Ray starts ahead of them.
    """
    if ray.is_initialized():
        yield
        return
    options = {
        "num_cpus": 8,  # of one thread each (tests/conftest.py)
        "include_dashboard": False,
        "object_store_memory": 512 * 1024**2,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    start_or_join(None, options)  # beside any cluster that `ray start` left running, too
    yield
    ray.shutdown()
