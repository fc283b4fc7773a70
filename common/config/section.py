"""The base of every configuration section: frozen, closed, documented."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads `off` as false."""


class Section(BaseModel):
    """A part of the run's one YAML file. Unknown fields are errors; values never change after start."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def filled_in(given: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A section's fields with `values` in place of defaults, also within sections; what is given wins."""
    filled = {**values, **given}
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            filled[name] = value | given[name]
    return filled
