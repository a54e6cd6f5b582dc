"""A LangGraph agent with a tool, on LangChain's client of OpenAI's API.

AREAL_RAY_ADMIN_KEY=KEY python -m recipes.online.langgraph_agent URL
"""

import os
import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from recipes.online.sessions import finish, start

QUESTION = "What is 17 plus 25?"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def graph(model: ChatOpenAI) -> Any:
    """Model and tool in turn, until the model calls none."""
    able = model.bind_tools([add])

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [able.invoke(state["messages"])]}

    builder = StateGraph(MessagesState).add_node("think", think)
    builder.add_node("tools", ToolNode([add]))
    builder.add_edge(START, "think")
    builder.add_conditional_edges("think", tools_condition)
    builder.add_edge("tools", "think")
    return builder.compile()


def attempt(url: str, session: dict[str, str]) -> str:
    """The final answer of an attempt; empty where it went in circles."""
    model = ChatOpenAI(model="policy", base_url=f"{url}/v1", api_key=session["api_key"])
    try:
        told = graph(model).invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 9})
    except GraphRecursionError:
        return ""
    return str(told["messages"][-1].content)


def main(url: str, admin_key: str) -> None:
    """One group of attempts."""
    for session in start(url, admin_key, QUESTION, group_size=2):
        answer = attempt(url, session)
        finish(url, session, reward=float(answer.strip() == "42"))


if __name__ == "__main__":
    main(sys.argv[1], os.environ["AREAL_RAY_ADMIN_KEY"])
