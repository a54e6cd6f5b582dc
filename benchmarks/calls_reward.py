"""Reward of the single-turn task: is the calculator call the one that was asked for?"""

from areal_ray.agents import Task
from areal_ray.core.trajectory import Trajectory


def right_call(task: Task, trajectory: Trajectory) -> float:
    """1 if the reply is the right call and nothing else, else 0."""
    return score(trajectory.final_text, task.fields["expression"])


def score(reply: str, expression: str) -> float:
    """The same of plain text."""
    return float(reply.strip() == f"<tool>{expression}</tool>")
