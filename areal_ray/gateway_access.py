"""How clients get to a run's gateway: its addresses and the admin key; what is wrong beforehand.

The admin key comes from AREAL_RAY_ADMIN_KEY or is made for the run. It is in this process and in
its clients' hands alone: actors, files and argument lists have its hash or nothing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

from areal_ray.engines.vllm_arguments import parser_problems
from areal_ray.gateway.keys import new_admin_key, weakness
from areal_ray.recipe import Recipe

ADMIN_KEY = "AREAL_RAY_ADMIN_KEY"
"""Environment variable that gives the admin key."""


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """What a program needs to start sessions."""

    urls: tuple[str, ...]
    """Of every gateway; each serves all sessions."""
    admin_key: str = field(repr=False)
    """Starts sessions and sets rewards; not to be written down."""

    @property
    def url(self) -> str:
        """Of the first gateway; what agents take as base URL."""
        return self.urls[0]

    def lines(self) -> str:
        """For the terminal, once: a key that the user chose is not repeated."""
        key = f"the one in {ADMIN_KEY}" if os.environ.get(ADMIN_KEY) else self.admin_key
        return f"gateway    {' '.join(self.urls)}\nadmin key  {key}"


def admin_key() -> str:
    """The key of the environment, or a new one."""
    return os.environ.get(ADMIN_KEY) or new_admin_key()


def gateway_problems(recipe: Recipe) -> Iterator[str]:
    """What keeps the gateway of a recipe from serving, before anything starts."""
    if not recipe.parts.serves:
        return
    missing = [name for name in ("fastapi", "uvicorn", "httptools") if find_spec(name) is None]
    if missing:
        yield (
            f"gateway: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            "kind: online needs it. pip install 'areal-ray[gateway]'."
        )
    given = os.environ.get(ADMIN_KEY, "")
    if given and weakness(given):
        yield f"{ADMIN_KEY}: {weakness(given)}. Unset it for a key of the run's own."
    yield from parser_problems(recipe.gateway.tool_parser, where="gateway")
