"""The calculator agent on Anthropic's SDK: a base URL and a key, nothing else.

AREAL_RAY_ADMIN_KEY=KEY python -m recipes.online.anthropic_agent URL
"""

import argparse
import itertools
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError, URLError

from anthropic import Anthropic, APIConnectionError, APIError

from areal_ray.agents import Task
from recipes.calculator.agent import calculate
from recipes.calculator.tasks import train
from recipes.online.sessions import finish, start

_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


def solve(task: Task, client: Anthropic) -> str:
    """Ask, run the tool if it is called, ask again."""
    messages: list[Any] = list(task.messages)
    said = _ask(client, messages)
    if (call := _CALL.search(said)) is None:
        return said
    # No id: this model writes its calls as text.
    result = {"type": "tool_result", "tool_use_id": "", "content": calculate(call[1])}
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    return _ask(client, messages)


def _ask(client: Anthropic, messages: list[Any]) -> str:
    reply = client.messages.create(model="policy", max_tokens=64, messages=messages)
    return "".join(block.text for block in reply.content if block.type == "text")


def attempt(url: str, session: dict[str, str], task: Task, client: Anthropic) -> None:
    """One attempt, and what it was worth."""
    try:
        answer = solve(task, client.with_options(api_key=session["api_key"]))
    except APIConnectionError:  # the gateway is gone, after as many tries as the client makes
        raise
    except APIError as error:  # this attempt is lost, the next may go well
        print(f"{session['session_id']}: {error}", file=sys.stderr, flush=True)
        return
    finish(url, session, reward=float(answer.strip() == task.answer))


def main() -> None:
    """Attempt tasks, each a few times: training compares the attempts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="as `areal-ray serve` prints it")
    parser.add_argument("--tasks", type=int, help="stop after so many; without it, never")
    parser.add_argument("--at-once", type=int, default=32, help="attempts side by side")
    args = parser.parse_args()
    if "AREAL_RAY_ADMIN_KEY" not in os.environ:
        parser.error("AREAL_RAY_ADMIN_KEY: is not set; must be the key that areal-ray serve prints")
    key = os.environ["AREAL_RAY_ADMIN_KEY"]
    client = Anthropic(base_url=args.url, api_key=key, max_retries=8)

    def play(tasks: list[Task]) -> None:
        for task in itertools.islice(itertools.cycle(tasks), len(tasks) if args.tasks else None):
            for session in start(args.url, key, task.id, group_size=8):
                attempt(args.url, session, task, client)

    tasks = train(args.tasks or 4096)
    try:
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(play, [tasks[one :: args.at_once] for one in range(args.at_once)]))
    except HTTPError:  # it is there, and refuses what it is asked for
        raise
    except (URLError, APIConnectionError) as error:
        sys.exit(f"{args.url}: nobody answers any more, as at the end of a run: {error}")


if __name__ == "__main__":
    main()
