"""Names of sessions, which their containers carry: whose they are can be read off them.

A name has letters, digits and hyphens only: it may be a label's value, and the name of a Compose project.
What follows two underscores is no part of it: Harbor appends it to the name of a trial.
"""

import re
from dataclasses import dataclass, replace

from tidemill.common.wire.messages import Lane

NAME = re.compile(
    r"tidemill-([0-9a-f]{8})-([te])-(\d+)-(\d+)-([0-9a-f]+)-(\d+)-(\d+)-(\d+)(?:__[a-z0-9_-]+)?"
)
LANES = {lane.value[0]: lane for lane in Lane}


@dataclass(frozen=True, slots=True)
class SessionName:
    """The session of one sample, by the lease under which it is played.

    Example: `tidemill-9f86d081-t-43-0-1a2b3c4d-42-3-17`: the run with that uid, training, the entry 43-0
    of the lane's tickets, held by the consumer `rollout-0.1a2b3c4d`, ticket 42, sample 3; it is the 17th
    session of that worker.
    """

    run_uid: str
    """Not the run's id: runs in two folders may have the same id, and one container engine."""
    lane: Lane
    entry_id: str
    consumer: str
    """The unique end of the consumer's name, after its last dot."""
    ticket: int
    index: int
    number: int = 0
    """Differs between all sessions of a worker: a late removal never meets a later attempt."""

    def __str__(self) -> str:
        parts = (self.run_uid, self.lane.value[0], self.entry_id, self.consumer)
        return "-".join(map(str, ("tidemill", *parts, self.ticket, self.index, self.number)))

    def numbered(self, number: int) -> "SessionName":
        return replace(self, number=number)


def unique_end(consumer_name: str) -> str:
    return consumer_name.rpartition(".")[2]


def read_name(text: str) -> SessionName | None:
    """The session of a label's value; None where the value is no name of ours."""
    match = NAME.fullmatch(text)
    if match is None:
        return None
    run_uid, letter, milliseconds, sequence, consumer, ticket, index, number = match.groups()
    entry_id = f"{milliseconds}-{sequence}"
    return SessionName(run_uid, LANES[letter], entry_id, consumer, int(ticket), int(index), int(number))
