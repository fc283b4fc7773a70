"""The base of every configuration section: frozen, closed, documented."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run's one YAML file. Unknown fields are errors; values never change after start."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
