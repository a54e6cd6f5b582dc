"""How clients get to a run's gateway: its addresses and the key; what is wrong beforehand.

The key comes from AREAL_RAY_ADMIN_KEY (kind online) or AREAL_RAY_API_KEY (kind inference), or is
made for the run. It is in this process and in its clients' hands alone: actors, files and argument
lists have its hash or nothing.
"""

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from areal_ray.engines.constraint_support import why_unconstrained
from areal_ray.engines.vllm_arguments import parser_problems
from areal_ray.gateway.keys import new_admin_key, weakness
from areal_ray.recipe import Recipe

ADMIN_KEY = "AREAL_RAY_ADMIN_KEY"
"""Environment variable that gives the admin key."""
_LAST_PORT = 65_535
_TAKEN_S = 3.0
API_KEY = "AREAL_RAY_API_KEY"
"""The same for the key that clients of kind inference send."""


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """What a program needs to call a gateway."""

    urls: tuple[str, ...]
    """Of every gateway; each serves all sessions."""
    admin_key: str = field(default="", repr=False)
    """Of kind online: starts sessions and sets rewards; not to be written down."""
    api_key: str = field(default="", repr=False)
    """Of kind inference: lets calls in; empty = all are. Not to be written down."""

    @property
    def url(self) -> str:
        """Of the first gateway; what agents take as base URL."""
        return self.urls[0]

    def lines(self) -> str:
        """For the terminal, once: a key that the user chose is not repeated."""
        lines = f"gateway    {' '.join(self.urls)}"
        for name, key, variable in (
            ("admin key", self.admin_key, ADMIN_KEY),
            ("api key", self.api_key, API_KEY),
        ):
            if key:
                told = f"the one in {variable}" if os.environ.get(variable) else key
                lines += f"\n{name:<9}  {told}"
        return lines


def access_key(recipe: Recipe) -> str:
    """The key of the environment, or a new one; empty where the recipe has no use for any."""
    if not recipe.parts.serves or recipe.gateway.no_key:
        return ""
    return os.environ.get(_variable(recipe)) or new_admin_key()


def _variable(recipe: Recipe) -> str:
    return ADMIN_KEY if recipe.parts.trains else API_KEY


def gateway_problems(recipe: Recipe) -> Iterator[str]:
    """What keeps the gateway of a recipe from serving, before anything starts."""
    if not recipe.parts.serves:
        return
    missing = [name for name in ("fastapi", "uvicorn", "httptools") if find_spec(name) is None]
    if missing:
        yield (
            f"gateway: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            f"kind: {recipe.kind} needs it. pip install 'areal-ray[gateway]'."
        )
    variable = _variable(recipe)
    given = os.environ.get(variable, "")
    if given and weakness(given) and not recipe.gateway.no_key:
        yield f"{variable}: {weakness(given)}. Unset it for a key of the run's own."
    for name, upstream in recipe.gateway.upstream.items():
        if upstream.key_env and not os.environ.get(upstream.key_env):
            yield (
                f"gateway.upstream.{name}.key_env: {upstream.key_env} is not set. Set that "
                "variable to the provider's key."
            )
    lacking = why_unconstrained(recipe.rollout.engine)
    if recipe.gateway.structured_output == "on" and lacking:
        yield f"gateway.structured_output: is on, but {lacking}"
    yield from parser_problems(recipe.gateway.tool_parser, where="gateway")
    yield from _address_problems(recipe)


def _address_problems(recipe: Recipe) -> Iterator[str]:
    gateway = recipe.gateway
    last = gateway.port + gateway.replicas - 1
    if gateway.port and last > _LAST_PORT:
        yield (
            f"gateway.port: is {gateway.port} with {gateway.replicas} replicas, the last of which "
            f"would take {last}; must be at most {1 + _LAST_PORT - gateway.replicas}. Lower it."
        )
        return
    for port in _ports(recipe):
        told = _refusal(gateway.host, port)
        if told is not None and told.errno != errno.EADDRINUSE:
            yield _unheard(gateway.host, port, told)
            return


def taken_address(recipe: Recipe, *, patience_s: float = _TAKEN_S) -> Iterator[str]:
    """What keeps the gateway from listening now, though nothing is wrong with the recipe.

    Waits `patience_s` for: a gateway that is about to end, where a run is resumed at once.
    """
    if not recipe.parts.serves:
        return
    end_s = time.monotonic() + patience_s
    for port in _ports(recipe):
        while (told := _refusal(recipe.gateway.host, port)) is not None:
            if told.errno != errno.EADDRINUSE:
                return  # of `gateway_problems`
            if time.monotonic() >= end_s:
                yield _unheard(recipe.gateway.host, port, told)
                return
            time.sleep(0.1)


def _ports(recipe: Recipe) -> Sequence[int]:
    """That the gateways are to listen on, where this can be tried; 0 = any."""
    gateway, cluster = recipe.gateway, recipe.cluster
    if recipe.scheduler.type != "local" or cluster.address or os.environ.get("RAY_ADDRESS"):
        return ()  # the gateway may be on another machine
    last = gateway.port + gateway.replicas - 1
    return range(gateway.port, min(last, _LAST_PORT) + 1) if gateway.port else (0,)


def _unheard(host: str, port: int, error: OSError) -> str:
    return (
        f"gateway.host, gateway.port: {host}:{port} cannot be listened on: "
        f"{error.strerror or error}. Choose another port, or 0 for any, or an address of this "
        "machine."
    )


def _refusal(host: str, port: int) -> OSError | None:
    """Listen there for a moment; what the system says against it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            return error
    return None
