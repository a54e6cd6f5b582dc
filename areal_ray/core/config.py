"""The one kind of configuration object: frozen, strict, unknown keys refused.

Each component owns its own subclass, in the file that uses it; `areal_ray.recipe` composes them.
"""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of every configuration section. The string below a field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
