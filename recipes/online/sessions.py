"""Sessions of a gateway over plain HTTP, by the standard library alone: copy it where it is needed.

(session,) = start(url, admin_key, "task 7")
...  # an agent calls the model at url, with session["api_key"]
finish(url, session, reward=1.0)
"""

import json
import time
import urllib.error
import urllib.request
from typing import Any


def start(url: str, admin_key: str, task_id: str, group_size: int = 1) -> list[dict[str, str]]:
    """Sessions for attempts at one task, each with `session_id` and `api_key`.

    Waits for: training to want a group.

    Raises:
        urllib.error.URLError: The gateway cannot be reached, or refuses the request.
    """
    while True:
        try:
            told = tell(
                url, "start_session", admin_key, {"task_id": task_id, "group_size": group_size}
            )
        except urllib.error.HTTPError as error:
            if error.code != 429:  # no room now, and how soon to come again
                raise
            time.sleep(float(error.headers["retry-after"]))
        else:
            return list(told["sessions"])


def finish(url: str, session: dict[str, str], reward: float) -> None:
    """Say what an attempt was worth, and that it is over.

    Raises:
        urllib.error.URLError: The gateway cannot be reached, or the session is over.
    """
    name, key = session["session_id"], session["api_key"]
    # With an id of its own a request may be sent again: it counts once.
    tell(url, "set_reward", key, {"reward": reward, "request_id": f"{name}/reward"})
    tell(url, "end_session", key, {"request_id": f"{name}/end"})


def tell(url: str, verb: str, key: str, body: dict[str, Any]) -> Any:
    """The answer to one request about sessions."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/rl/{verb}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
