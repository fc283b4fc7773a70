"""Dead letters, and the messages and consumers from which workers make them."""

from typing import Any

import numpy as np

from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery, append, dead_letter
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire import codec
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Message, SamplingParams, Ticket, Trajectory


def make_ticket(number: int, **fields: Any) -> Ticket:
    """A ticket of two samples, one ticket a step."""
    values: dict[str, Any] = {
        "step": number,
        "min_version": 0,
        "group_size": 2,
        "sampling": SamplingParams(max_tokens=4),
        "prompt_ids": np.arange(3, dtype=np.int32),
    }
    return Ticket(ticket=number, **(values | fields))


def tickets_of(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN, name: str = "w1") -> Consumer[Ticket]:
    """A rollout worker's consumer."""
    key = keys.prompts(lane)
    return Consumer(broker, key, ROLLOUT_GROUP, name, Ticket, lease_s=1.0, dead_key=keys.dead)


def samples_of(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN, name: str = "w1") -> Consumer[Trajectory]:
    """A reward worker's consumer."""
    key = keys.trajectories(lane)
    return Consumer(broker, key, REWARD_GROUP, name, Trajectory, lease_s=1.0, dead_key=keys.dead)


async def dead_letter_next(consumer: Consumer[Any], keys: Keys) -> None:
    """Take one message and dead-letter it, as a worker does that cannot process it."""
    (entry,) = await consumer.fetch(1, 1.0)
    message = entry.message if isinstance(entry, Delivery) else None
    origin = keys.name_of(consumer.key)
    letter = dead_letter(
        origin, entry.entry_id, entry.fields, "it raised", "rollout-0", message=message, attempts=5
    )
    assert await consumer.dead_letter(entry, letter)


async def write_letter(
    broker: Broker, keys: Keys, origin: str, message: Message | bytes, **fields: Any
) -> str:
    """Append a dead letter of which only the bytes are known; returns its id."""
    if isinstance(message, Message):
        original = {name.decode(): value for name, value in codec.encode(message).items()}
    else:
        original = {"v": codec.SCHEMA, "p": message}
    letter = DeadLetter(
        **{"origin": origin, "entry_id": "1-0", "fields": original, "error": "broken"} | fields
    )
    (letter_id,) = await append(broker, keys.dead, letter)
    return letter_id
