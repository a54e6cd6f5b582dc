"""An agent on the standard library alone, a process for each episode; argv says how it behaves."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from typing import Any

TASK = json.load(sys.stdin)


def post(url: str, body: Any) -> Any:
    """The JSON that a POST under the episode's key is answered with."""
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)


def ask(messages: list[Any], **options: Any) -> Any:
    """The assistant's message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **options}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]


def status_of(url: str, body: Any) -> int:
    """How a POST that is refused is answered."""
    try:
        post(url, body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def two_turns(**options: Any) -> None:
    """A turn, a tool's word, a turn."""
    messages = list(TASK["messages"])
    messages += [ask(messages, **options), {"role": "user", "content": "go on"}]
    ask(messages, **options)


def main(kind: str) -> None:
    """Behave as told."""
    if kind == "silent":
        return
    if kind == "seeded":
        two_turns(seed=7, temperature=0.01)
    elif kind == "too_many":
        while True:
            two_turns()
    elif kind == "too_long":
        ask([{"role": "user", "content": "so " * 2000}])
    elif kind == "far_too_long":
        two_turns()
        ask([*TASK["messages"], {"role": "user", "content": "so " * 200_000}])
    elif kind == "scores":
        two_turns()
        url = os.environ["AREAL_RAY_URL"] + "/rl/set_reward"
        post(url, {"reward": 0.25})
        wrong: list[Any] = [{"reward": "high"}, {"reward": 1, "turn": 0}, []]
        assert [status_of(url, body) for body in wrong] == [400, 400, 400]
        print('{"reward": 0.5}')
    elif kind == "killed_at_first":  # in the middle of a turn, where it is a first attempt
        two_turns()
        with open(sys.argv[2], "a", encoding="utf-8") as file:
            file.write("x")
            is_first = file.tell() == 1
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "fails":
        two_turns()
        sys.exit(f"no such tool, says {os.environ['OPENAI_API_KEY']}")
    else:
        two_turns()


if __name__ == "__main__":
    main(sys.argv[1])
