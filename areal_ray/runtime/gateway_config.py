"""What a recipe says about the gateway. Light to import: no Ray, no torch, no HTTP."""

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from areal_ray.agents.episode import ReasoningParser, ToolParser
from areal_ray.core.config import Config
from areal_ray.gateway.sessions import SessionsConfig
from areal_ray.gateway.upstream_config import UpstreamConfig


class GatewayConfig(Config):
    """Where agents reach the policy, and what is made of what they send."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Whoever reaches it may try keys: 0.0.0.0 is for trusted networks."""
    no_key: bool = False
    """Answer whoever calls (kind inference). Only where host is of this machine's loopback."""
    port: int = Field(0, ge=0, le=65_535)
    """0 = any that is free, and the same one after a restart. Further replicas take the next."""
    replicas: int = Field(1, ge=1, le=64)
    """GatewayActors; sessions are spread over them, and each passes on calls for the others'."""
    num_cpus: float = Field(0.0, ge=0.0)
    """CPU cores reserved for each."""
    tool_parser: ToolParser = "auto"
    """As agent.tool_parser."""
    reasoning_parser: ReasoningParser = "auto"
    """As agent.reasoning_parser."""
    dropped_reasoning: Literal["splice", "branch"] = "splice"
    """What a turn is that comes back without its reasoning: the recorded one all the same (splice),
    or another history (branch)."""
    untaken: Literal["drop", "train"] = "drop"
    """What becomes of the other answers where a client asked for several and went on from one."""
    aborted: Literal["drop", "train"] = "drop"
    """What becomes of turns whose client left before their end."""
    structured_output: Literal["auto", "on", "off"] = "auto"
    """Whether replies are held to what a call asks for: a JSON schema, a tool call, strict tools.
    auto: where nothing trains on them (kind inference). on: in sessions that train too; such a
    turn is context for later ones and carries no loss itself. off: that is read and passed over."""
    turn_timeout_s: float = Field(600.0, gt=0.0)
    """Longest wait for one turn, restarts of rollout replicas included."""
    max_body_bytes: int = Field(32 * 2**20, ge=2**10)
    """Of a request."""
    max_concurrent_calls: int = Field(8192, ge=1)
    """More are turned away with 503."""
    sessions: SessionsConfig = SessionsConfig()
    """How long sessions last (kind online)."""
    upstream: dict[str, UpstreamConfig] = Field({})
    """Providers by name that may serve a session in place of the policy (kind online), for
    evaluation and for data: `{NAME: {url, key_env, model, limit_field}}`. Recorded as text; never
    trained."""

    @property
    def is_on_loopback(self) -> bool:
        """Whether nothing but this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What training wants of the sessions."""

    least_rewarded: int
    """Sessions with a reward below which a group is rejected."""
    has_reward_function: bool
    """Sessions without a reward are scored by the run; then none is rejected for lack of one."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a gateway has to know of the engines behind it."""

    context_tokens: int = 0
    """Prompt and sampled tokens that one holds at most; 0 = what the model allows, as they read
    it."""
    why_unconstrained: str = ""
    """Why they hold no reply to a grammar; empty if they can."""
