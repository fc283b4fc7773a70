"""The checks of a step's numbers: healthy range, what it means to leave it, and what to do then."""

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
        yield (
            self.low is not None and self.high is not None and self.low > self.high,
            f"low ({self.low}) is above high ({self.high}): no value would be healthy",
        )

    def holds(self, value: float) -> bool:
        """Whether `value` is healthy; what is not a number never is, where there is a bound at all."""
        if self.low is None and self.high is None:
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class Check(Section):
    """One number that is watched. `name` stands in `trainer.diagnostics` and in Prometheus."""

    name: str
    metric: str
    healthy: HealthyRange
    problem: str
    """What it means when the number is too high, or too low where it can only be that."""
    advice: str = ""
    problem_low: str = ""
    """Where the number can leave at both ends: what it means when it is too low."""
    advice_low: str = ""


CHECKS = {name: Check(name=name, **fields) for name, fields in read_table("diagnostics").items()}
"""All checks by name, in the order in which they are shown."""


def _are_checks(ranges: dict[str, HealthyRange]) -> dict[str, HealthyRange]:
    if unknown := ranges.keys() - CHECKS.keys():
        raise ValueError(f"there is no check {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
    return ranges


Ranges = Annotated[dict[str, HealthyRange], AfterValidator(_are_checks)]
"""By the name of a check: the healthy range in place of its own."""


def checks_with(ranges: Ranges) -> list[Check]:
    """All checks, some of them with other ranges."""
    return [c.model_copy(update={"healthy": ranges.get(name, c.healthy)}) for name, c in CHECKS.items()]
