"""The checks of a step's metrics: healthy range, meaning of a value outside of it, and advice."""

from typing import Annotated

from pydantic import AfterValidator, Field

from tidemill.common.config.section import Rules, Section, read_table


class HealthyRange(Section):
    """A healthy range; null is no bound."""

    low: float | None = Field(None, ge=-1e9, le=1e9)
    """Lowest value."""
    high: float | None = Field(None, ge=-1e9, le=1e9)
    """Highest value."""

    def rules(self) -> Rules:
        if self.low is not None and self.high is not None and self.low > self.high:
            yield f"low ({self.low}) is above high ({self.high}): no value would be healthy"

    def holds(self, value: float) -> bool:
        """Whether `value` is healthy; NaN is healthy only where there is no bound."""
        if self.low is None and self.high is None:
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class Check(Section):
    """One metric that is watched. `name` is used in `trainer.diagnostics` and in Prometheus."""

    name: str
    metric: str
    healthy: HealthyRange
    problem: str
    """Meaning of a number that is too high, or too low where there is no `problem_low`."""
    advice: str = ""
    problem_low: str = ""
    """Meaning of a number that is too low, where it can also be too high."""
    advice_low: str = ""


CHECKS = {name: Check(name=name, **fields) for name, fields in read_table("diagnostics").items()}
"""All checks by name, in the order in which they are shown."""


def _are_checks(ranges: dict[str, HealthyRange]) -> dict[str, HealthyRange]:
    unknown = ranges.keys() - CHECKS.keys()
    if unknown:
        raise ValueError(f"there is no check {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
    return ranges


Ranges = Annotated[dict[str, HealthyRange], AfterValidator(_are_checks)]
"""Name of a check -> the healthy range that replaces its own."""


def checks_with(ranges: Ranges) -> list[Check]:
    """All checks, with the ranges that `ranges` replaces."""
    return [c.model_copy(update={"healthy": ranges.get(name, c.healthy)}) for name, c in CHECKS.items()]
