"""The settings of sampling that leave ids out: each is one row here.

Sections of the config, messages, engines and the trainer's masks follow from the rows: a new one is a field
with its default, at which it is off. The engine `transformers` also needs its arithmetic
(`services/rollout/engines/decoding.py`); until it has that, it refuses the setting.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class TokenFilters(BaseModel):
    """Which ids a token is sampled from; logprobs are those of the distribution over these.

    Example: `top_p` 0.9: the likeliest ids that have 90 % together. Each field is off at its default.
    """

    model_config = ConfigDict(frozen=True)

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sample among the likeliest tokens that have this probability together; 1: all."""
    top_k: int = Field(0, ge=0, le=1 << 20)
    """Sample among the k likeliest tokens; 0: all."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    """Least probability, as a share of the likeliest token's; 0 is off."""

    def filters(self) -> dict[str, Any]:
        """The filters by name, those that are off too: what an engine is given."""
        return {name: getattr(self, name) for name in FILTERS}

    @property
    def filters_on(self) -> list[str]:
        """Names of those that leave ids out."""
        return [name for name, off in FILTERS.items() if getattr(self, name) != off]


FILTERS: dict[str, Any] = {name: field.default for name, field in TokenFilters.model_fields.items()}
"""By name, the value at which a filter is off."""
FILTER_NAMES = ", ".join(FILTERS)
"""For messages: `top_p, top_k, min_p`."""
