"""One local Ray session for every chaos test; each test ends its own actors."""

from collections.abc import Iterator

import pytest

from tests.support.ray_session import shared_ray
from tests.support.whole_runs import runs as runs


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A real one-node Ray with 8 CPUs to place on, whatever the machine has.

    A test that needs its own cluster must run in a child process: this session stays up.
    """
    with shared_ray():
        yield
