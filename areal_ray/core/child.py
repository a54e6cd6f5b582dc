"""The command line of a child process that runs a module of this package."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_START = "import sys; sys.path[:0] = [sys.argv[1]]; from {} import main; main(sys.argv[2])"


def child_command(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Have this interpreter call `main` of a module with the settings as JSON.

    The package is found wherever this process has it from; nothing else is looked for first.
    """
    home = str(Path(__file__).parents[2])
    return [sys.executable, "-c", _START.format(module), home, json.dumps(settings)]
