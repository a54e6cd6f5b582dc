"""The one kind of configuration object: frozen, strict, unknown keys refused.

Each component owns its own subclass, in the file that uses it; `areal_ray.recipe` composes them.
"""

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as people write them: `~` is their home, which a shell leaves in `key=~/folder`."""


class Config(BaseModel):
    """Base of every configuration section. The string below a field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    former_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that are no more -> what to write instead; told to whoever still uses them."""
