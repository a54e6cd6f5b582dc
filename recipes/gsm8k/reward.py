"""A reward with something to learn for a model that is too small to be right."""

from typing import Any

from areal_ray.core.task import Task
from areal_ray.core.trajectory import Trajectory
from areal_ray.rewards.extraction import last_number_in
from areal_ray.rewards.math import score


def right_or_close_to_form(
    task: Task, trajectory: Trajectory, form_reward: float = 0.2, full_characters: int = 400
) -> dict[str, Any]:
    """1 if the answer is right, else up to `form_reward` for a short reply that holds a number.

    Args:
        task: Its answer is the number after `####`.
        trajectory: Its final text is read as `areal_ray.rewards.math.score` does.
        form_reward: Most that a wrong reply can get.
        full_characters: A reply as long as this gets half of it, a shorter one more.
    """
    verdict = score(task, trajectory)
    has_number = bool(last_number_in(trajectory.final_text))
    brevity = max(0.0, 1.0 - len(trajectory.final_text) / full_characters)
    form = form_reward * (0.5 + 0.5 * brevity) if has_number else 0.0
    return {**verdict, "correct": verdict["reward"], "reward": max(verdict["reward"], form)}
