"""One local Ray session for every integration test; each test ends its own actors."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A real one-node Ray. CPUs are oversubscribed: tests place more actors than there are cores.

    A test that needs its own cluster must run in a child process: this session stays up.
    """
    # One thread an actor: more would fight for the cores.
    env = {"OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=512 * 1024**2,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": env},
    )
    yield
    ray.shutdown()
