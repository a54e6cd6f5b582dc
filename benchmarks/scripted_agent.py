"""Two turns whatever the model says: an episode whose cost is all overhead."""

from areal_ray.agents import Task
from areal_ray.agents.chat_client import ChatClient


async def two_turns(task: Task, client: ChatClient, max_tokens: int = 1) -> None:
    """Ask, hand back a tool's answer, ask again."""
    messages: list[object] = list(task.messages)
    for turn in range(2):
        reply = await client.chat.completions.create(messages=messages, max_tokens=max_tokens)
        if turn == 0:
            messages += [reply.choices[0].message, {"role": "tool", "content": task.answer}]
