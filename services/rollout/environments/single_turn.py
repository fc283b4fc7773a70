"""The smallest environment: one completion, and nothing that answers it."""

from collections.abc import Callable, Sequence
from typing import Any

from common.wire.messages import Ticket
from common.wire.segments import Segment
from services.rollout.sessions.player import Ask, Played


class SingleTurn:
    """Plays a sample by asking the engine once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    async def start(self) -> None:
        """Nothing is needed."""

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        """One completion. Raises ValueError: the engine refuses the prompt."""
        generation = await ask(ticket.prompt_ids.tolist(), ticket.sampling)
        only: dict[str, Any] = {
            "prompt_ids": ticket.prompt_ids,
            "completion_ids": generation.token_ids,
            "logprobs": generation.logprobs,
            "spans": generation.spans,
        }
        # Not validated here: the trajectory that is made of it is.
        first = Segment.model_construct(**only)
        return Played(first, self._decode(generation.token_ids), generation.finish)

    async def close(self) -> None:
        """Nothing was started."""
