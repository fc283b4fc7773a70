"""The smallest environment: one completion, and nothing that answers it."""

from typing import Any

from tidemill.common.config.run import RunConfig
from tidemill.common.wire.messages import Ticket
from tidemill.common.wire.segments import Segment
from tidemill.services.rollout.sessions.player import Ask, Decode, OpenChat, Played


class SingleTurn:
    """Plays a sample by asking the engine once."""

    def __init__(self, config: RunConfig, decode: Decode, open_chat: OpenChat) -> None:
        self._decode = decode

    async def start(self) -> None:
        """Nothing is needed."""

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        """One completion. Raises ValueError: the engine refuses the prompt."""
        generation = await ask(ticket.prompt_ids.tolist(), ticket.sampling)
        # Nothing is checked here: the trajectory that is made of it is, and twice would cost time.
        sampled: dict[str, Any] = {
            "prompt_ids": ticket.prompt_ids,
            "completion_ids": generation.token_ids,
            "logprobs": generation.logprobs,
            "spans": generation.spans,
        }
        segment = Segment.model_construct(**sampled)
        return Played(segment, self._decode(generation.token_ids), generation.finish)

    async def close(self) -> None:
        """Nothing was started."""
