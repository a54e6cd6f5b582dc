"""What a recipe says of providers that serve sessions in place of the policy. Light to import."""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from areal_ray.core.config import Config


class UpstreamConfig(Config):
    """One provider with OpenAI's Chat Completions: sessions that name it are answered by it, and
    recorded as text alone."""

    url: str
    """Base of its API, as http://host:port/v1. Clients choose among these, and no others."""
    key_env: str = ""
    """Environment variable of the gateway's that holds its key; empty = it asks for none."""
    model: str = Field(min_length=1)
    """What it calls the model."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What it calls the limit on a reply's tokens. OpenAI's reasoning models take
    max_completion_tokens alone."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_plain = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            )
        except ValueError:
            is_plain = False
        if not is_plain or parts.username is not None or "?" in url or "#" in url:
            raise ValueError(
                f"is {url!r}; must be http://HOST/PATH or https://..., without a user, ? or #"
            )
        return url.rstrip("/")

    @field_validator("key_env")
    @classmethod
    def _check_variable(cls, name: str) -> str:
        if name and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                "is no name of an environment variable; must be one, not the key itself"
            )
        return name
