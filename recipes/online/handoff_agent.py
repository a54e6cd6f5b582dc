"""Two agents of OpenAI's Agents SDK, of which one hands over to the other.

AREAL_RAY_ADMIN_KEY=KEY python -m recipes.online.handoff_agent URL
"""

import os
import sys

from agents import Agent, Runner, function_tool
from agents.exceptions import AgentsException
from agents.models.openai_provider import OpenAIProvider
from agents.run import RunConfig

from recipes.online.sessions import finish, start


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ACCOUNTANT = Agent("accountant", instructions="Use add. Say the number alone.", tools=[add])
DESK = Agent("desk", instructions="Hand sums over to the accountant.", handoffs=[ACCOUNTANT])
QUESTION = "What is 17 plus 25?"


def attempt(url: str, session: dict[str, str]) -> str:
    """The final answer of an attempt; empty where the agents went in circles."""
    provider = OpenAIProvider(api_key=session["api_key"], base_url=f"{url}/v1")
    config = RunConfig(model_provider=provider, model="policy", tracing_disabled=True)
    try:
        return str(Runner.run_sync(DESK, QUESTION, max_turns=8, run_config=config).final_output)
    except AgentsException as error:  # what the model did is worth nothing, and no accident
        print(f"{session['session_id']}: {error}", file=sys.stderr)
        return ""


def main(url: str, admin_key: str) -> None:
    """One group of attempts."""
    for session in start(url, admin_key, QUESTION, group_size=2):
        answer = attempt(url, session)
        finish(url, session, reward=float(answer.strip() == "42"))


if __name__ == "__main__":
    main(sys.argv[1], os.environ["AREAL_RAY_ADMIN_KEY"])
