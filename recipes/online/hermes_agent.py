"""hermes-agent as it is: a configuration file that names the gateway, and its own command line.

AREAL_RAY_ADMIN_KEY=KEY python -m recipes.online.hermes_agent URL
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from recipes.online.sessions import finish, start

ASK = "Count the lines of notes.txt with a command. Say the number alone."
ANSWER = "3"
LONGEST_S = 300


def attempt(url: str, session: dict[str, str], toolsets: str) -> str:
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
        chosen = ["-t", toolsets] if toolsets else []
        agent = subprocess.run(
            ["hermes", "chat", "-Q", "--yolo", *chosen, "-q", ASK],
            cwd=desk,
            env={**os.environ, "HERMES_HOME": str(home), "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=LONGEST_S,
            check=True,
        )
    return agent.stdout


def worth(answer: str) -> float:
    """1 for the right answer; up to 0.1 for digits, so that a beginner has something to climb."""
    if ANSWER in answer.split():
        return 1.0
    return 0.1 * sum(one.isdigit() for one in answer) / max(len(answer), 1)


def main() -> None:
    """Groups of attempts at one task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="as `areal-ray serve` prints it")
    parser.add_argument("--groups", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--toolsets", default="", help="of hermes; all of them if not given")
    args = parser.parse_args()
    if "AREAL_RAY_ADMIN_KEY" not in os.environ:
        parser.error("AREAL_RAY_ADMIN_KEY: is not set; must be the key that areal-ray serve prints")
    key = os.environ["AREAL_RAY_ADMIN_KEY"]
    for _ in range(args.groups):
        for session in start(args.url, key, "count lines", group_size=2):
            answer = attempt(args.url, session, args.toolsets)
            finish(args.url, session, reward=worth(answer))


if __name__ == "__main__":
    main()
