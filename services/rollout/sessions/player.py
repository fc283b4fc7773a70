"""What plays one sample: one completion, a session with an environment, or an agent program's session."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.common.wire.segments import Finish, Segment, Session
from tidemill.services.rollout.engines.engine import Generation

Ask = Callable[[Sequence[int], SamplingParams], Awaitable[Generation]]
"""One turn: the engine continues token ids. Cancelling it aborts the request."""


@dataclass(frozen=True, slots=True)
class Played:
    """A session as it was played: the first segment, and what lies beside it."""

    first: Segment
    text: str
    finish: Finish = "stop"
    session: Session | None = None

    def fields(self) -> dict[str, Any]:
        names = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "spans")
        fields = {name: getattr(self.first, name) for name in names}
        return fields | {"text": self.text, "finish": self.finish, "session": self.session}


class Sampled(Protocol):
    """One sample as it was played, whatever it was."""

    def fields(self) -> dict[str, Any]:
        """Fields of the `Trajectory`."""


class Player(Protocol):
    """Plays samples, many at once; made once for each worker process."""

    async def start(self) -> None:
        """Load what it needs. Raises ConfigError: the environment cannot be used as configured."""

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Sampled:
        """Play one sample of the ticket to its end; `name` tells it from all others that run.

        Raises:
            EnvironmentFaultError: the environment failed in every attempt: no fault of the model's.
            ValueError: the engine refuses the prompt.
        """

    async def close(self) -> None:
        """End what it started: processes, servers, environments."""
