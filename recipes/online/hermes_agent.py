"""hermes-agent as it is: a configuration file that names the gateway, and its own command line.

AREAL_RAY_ADMIN_KEY=KEY python -m recipes.online.hermes_agent URL
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from recipes.online.sessions import finish, start

ASK = "Count the lines of notes.txt with a command. Say the number alone."
LONGEST_S = 300


def attempt(url: str, session: dict[str, str]) -> str:
    """What the agent says at the end of an attempt."""
    with tempfile.TemporaryDirectory() as folder:
        home, desk = Path(folder, "home"), Path(folder, "desk")
        home.mkdir()
        desk.mkdir()
        (desk / "notes.txt").write_text("one\ntwo\nthree\n")
        model = {
            "default": "policy",
            "provider": "custom",
            "base_url": f"{url}/v1",
            "api_key": session["api_key"],
            "context_length": 131072,
        }
        (home / "config.yaml").write_text(json.dumps({"model": model}))  # JSON is YAML
        agent = subprocess.run(
            ["hermes", "chat", "-Q", "--yolo", "-q", ASK],
            cwd=desk,
            env={**os.environ, "HERMES_HOME": str(home), "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LONGEST_S,
            check=True,
        )
    return agent.stdout


def main(url: str, admin_key: str) -> None:
    """One group of attempts."""
    for session in start(url, admin_key, "count lines", group_size=2):
        answer = attempt(url, session).split()
        finish(url, session, reward=float("3" in answer))


if __name__ == "__main__":
    main(sys.argv[1], os.environ["AREAL_RAY_ADMIN_KEY"])
