"""What one named reward came to for one sample, after all attempts: a part of the sample's score."""

from dataclasses import dataclass, field

from common.messages import ScoreStatus
from services.reward.outcome import AttemptError, Detail, NamelessTry, Outcome


@dataclass(slots=True)
class Part:
    """Only `ok` may have a value; `ok` without one means that the reward does not apply to the sample.

    `kind` says in a word how a failure failed, for counts: `timeout`, `error`, `http_429`, ...
    """

    status: ScoreStatus = ScoreStatus.OK
    value: float | None = None
    error: str = ""
    kind: str = ""
    tries: list[NamelessTry] = field(default_factory=list)
    """All attempts, where there were several."""
    components: dict[str, float | None] = field(default_factory=dict)
    detail: Detail = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.status = ScoreStatus(self.status)  # a plain text where it comes out of Redis

    @property
    def attempts(self) -> int:
        """How many there were."""
        return len(self.tries) or 1

    @property
    def is_ok(self) -> bool:
        """Whether the reward said something, if only that it does not apply."""
        return self.status is ScoreStatus.OK

    @classmethod
    def of(cls, outcome: Outcome, tries: list[NamelessTry]) -> "Part":
        """The part that an attempt which succeeded makes."""
        return cls(value=outcome.value, tries=tries, components=outcome.components, detail=outcome.detail)

    @classmethod
    def failed(cls, error: AttemptError) -> "Part":
        """The part that remains when the last attempt failed."""
        status = ScoreStatus.TIMEOUT if error.is_timeout else ScoreStatus.FAILED
        return cls(status, None, str(error), error.kind, error.tries)
