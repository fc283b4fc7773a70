"""The smallest environment: one completion, and nothing that answers it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.common.wire.messages import Ticket
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.player import Ask


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as the engine gave it. Nothing is checked here: the trajectory made of it is."""

    ticket: Ticket
    generation: Generation
    text: str

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_ids": self.ticket.prompt_ids,
            "completion_ids": self.generation.token_ids,
            "logprobs": self.generation.logprobs,
            "spans": self.generation.spans,
            "finish": self.generation.finish,
            "text": self.text,
        }


class SingleTurn:
    """Plays a sample by asking the engine once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    async def start(self) -> None:
        """Nothing is needed."""

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Completion:
        """One completion. Raises ValueError: the engine refuses the prompt."""
        generation = await ask(ticket.prompt_ids.tolist(), ticket.sampling)
        return Completion(ticket, generation, self._decode(generation.token_ids))

    async def close(self) -> None:
        """Nothing was started."""
