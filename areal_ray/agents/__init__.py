"""Task streams, episodes and the chat client agents speak to.

For agents: `Task` (what to solve) and `EnvError` (raise it when the world failed, not the model).
"""

from areal_ray.agents.episode import EnvError
from areal_ray.core.task import Task

__all__ = ["EnvError", "Task"]
