"""The calculator agent as a program of its own: OpenAI's SDK, a base URL and a key, nothing else.

    AREAL_RAY_ADMIN_KEY=KEY python -m recipes.online.openai_agent URL

It opens a group of sessions for each task, attempts the task once in each, and says how it went.
Training learns from that; the agent only ever calls a model that gets better.
"""

import argparse
import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import openai

from areal_ray.agents import Task
from recipes.calculator.agent import calculate
from recipes.calculator.tasks import train

_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
_ASK_AGAIN_S = 0.2
_TRIES = 20
"""After the first: a gateway that restarts is back within seconds, on a busy machine within half a
minute."""


class Program:
    """Plays tasks against one gateway.

    Args:
        url: Of the gateway.
        admin_key: Opens sessions.
        group_size: Attempts at a task.
        log: Takes a JSON line for each session that was ended and acknowledged; None = no file.
    """

    def __init__(self, url: str, admin_key: str, *, group_size: int, log: Path | None) -> None:
        self._admin = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=admin_key)
        self._group_size = group_size
        self._log = log.open("a", encoding="utf-8") if log is not None else None

    async def play(self, tasks: "asyncio.Queue[Task]") -> None:
        """One task after the other."""
        while True:
            task = await tasks.get()
            tasks.put_nowait(task)  # around and around
            sessions = await self._start(task)
            await asyncio.gather(*(self._attempt(task, one) for one in sessions))

    async def _start(self, task: Task) -> list[dict[str, str]]:
        """Sessions for a group, once training wants one."""
        asked = {"task_id": task.id, "group_size": self._group_size}
        while True:
            try:
                once = self._admin.with_options(max_retries=0)
                started: Any = await once.post("/rl/start_session", cast_to=object, body=asked)
            except (openai.RateLimitError, openai.APIConnectionError, openai.InternalServerError):
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                return list(started["sessions"])

    async def _attempt(self, task: Task, session: dict[str, str]) -> None:
        client = self._admin.with_options(api_key=session["api_key"], max_retries=_TRIES)
        name = session["session_id"]
        try:
            answer = await _solve(task, client)
            reward = float(answer.strip() == task.answer)
            # With an id of its own a request may be sent again: it counts once.
            for verb, told in (("set_reward", {"reward": reward}), ("end_session", {})):
                body = {**told, "request_id": f"{name}/{verb}"}
                await client.post(f"/rl/{verb}", cast_to=object, body=body)
        except openai.APIError as error:  # this attempt is lost, the next may go well
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return
        if self._log is not None:
            told = {"session": name, "reward": reward}
            self._log.write(json.dumps(told) + "\n")
            self._log.flush()


async def _solve(task: Task, client: openai.AsyncOpenAI) -> str:
    """What an agent would do with any model: ask, run the tool if it is called, ask again."""
    messages: list[Any] = list(task.messages)
    said = await _ask(client, messages)
    call = _CALL.search(said)
    if call is None:
        return said
    messages += [
        {"role": "assistant", "content": said},
        {"role": "tool", "content": calculate(call[1])},
    ]
    return await _ask(client, messages)


async def _ask(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    asked: dict[str, Any] = {"model": "policy", "messages": messages, "stream": True}
    for again in range(_TRIES + 1):
        said = ""
        stream = await client.chat.completions.create(**asked)
        try:
            async for chunk in stream:
                said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            return said
        except openai.APIConnectionError:  # the SDK does not take up a stream that broke off
            if again == _TRIES:
                raise
            await asyncio.sleep(_ASK_AGAIN_S)
    raise AssertionError("the last try returns or raises")


async def main() -> None:
    """Play until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the gateway, as `areal-ray serve` prints it")
    parser.add_argument("--groups", type=int, default=64, help="tasks attempted at once")
    parser.add_argument("--group-size", type=int, default=8, help="attempts at a task")
    parser.add_argument("--log", type=Path, help="file for a line a session")
    args = parser.parse_args()
    if "AREAL_RAY_ADMIN_KEY" not in os.environ:
        parser.error("AREAL_RAY_ADMIN_KEY: is not set; must be the key that areal-ray serve prints")
    key = os.environ["AREAL_RAY_ADMIN_KEY"]
    program = Program(args.url, key, group_size=args.group_size, log=args.log)
    tasks: asyncio.Queue[Task] = asyncio.Queue()
    for task in train():
        tasks.put_nowait(task)
    async with asyncio.TaskGroup() as players:
        for _ in range(args.groups):
            players.create_task(program.play(tasks))


if __name__ == "__main__":
    asyncio.run(main())
