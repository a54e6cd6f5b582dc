"""The calculator agent as a program of its own, on OpenAI's SDK alone: nothing of areal_ray here.

It knows its task from standard input, and the model by OPENAI_BASE_URL and OPENAI_API_KEY, which
the SDK reads by itself. Pointed at any other server it does the same.
"""

import json
import os
import re
import sys

from openai import OpenAI

_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
_SUM = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")


def main() -> None:
    """Ask, run the calculator if it is called, ask again."""
    task = json.load(sys.stdin)
    client = OpenAI()
    model = os.environ["OPENAI_MODEL"]
    messages = list(task["messages"])
    reply = client.chat.completions.create(model=model, messages=messages).choices[0].message
    call = _CALL.search(reply.content or "")
    if call is not None:
        messages += [reply, {"role": "tool", "content": calculate(call[1]), "tool_call_id": "sum"}]
        client.chat.completions.create(model=model, messages=messages)


def calculate(expression: str) -> str:
    """The value of a sum, difference or product of two whole numbers; 'error' for all else."""
    found = _SUM.fullmatch(expression)
    if found is None:
        return "error"
    first, second = int(found[1]), int(found[3])
    values = {"+": first + second, "-": first - second, "*": first * second}
    return str(values[found[2]])


if __name__ == "__main__":
    main()
