"""Processes of a test, each a rank; they end with it."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def spawn() -> Iterator[Callable[..., Any]]:
    """Starts a function with its arguments in a new process, which has nothing of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["areal_ray.engines.torch_train"])  # imported once for all
    processes: list[Any] = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        process = context.Process(target=target, args=arguments)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()
