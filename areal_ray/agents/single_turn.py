"""The agent for tasks that one reply answers."""

from areal_ray.agents.chat_client import ChatClient
from areal_ray.core.task import Task


async def answer(task: Task, client: ChatClient) -> None:
    """Ask once; the reward reads the reply."""
    await client.chat.completions.create(messages=list(task.messages))
