"""What can be known to be wrong with a recipe's agent before an actor starts."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from areal_ray.agents.episode import AgentConfig, check_agent
from areal_ray.agents.program import program_command, program_environment, task_json
from areal_ray.core.imports import resolve
from areal_ray.core.task import Task
from areal_ray.errors import DataError, RecipeError
from areal_ray.runtime.cluster import own_environment

_SERVES_WITH = ("fastapi", "uvicorn", "httptools")


def check_agent_section(config: AgentConfig, roots: list[Path]) -> None:
    """Refuse an agent that could not run here.

    Raises:
        RecipeError: What is wrong with it.
    """
    if config.command is None:
        check_agent(resolve(config.run, roots, where="agent.run"), config)
        return
    missing = [name for name in _SERVES_WITH if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"agent.command: needs {', '.join(missing)}, not installed here, to serve the agent's "
            "calls. pip install 'areal-ray[gateway]'."
        )
    environment = program_environment(config, own_environment())
    program_command(config, roots, environment["PATH"])


def unwritable_task(config: AgentConfig, tasks: Iterable[Task]) -> str | None:
    """The first task that a program could not be given, and why; None if all can be."""
    if config.command is None:
        return None
    for task in tasks:
        try:
            task_json(task, shows_answer=config.shows_answer)
        except DataError as error:
            return str(error)
    return None
