"""What processes that were killed leave in Redis for ever: a heartbeat, and a consumer in each group.

Both are small, but people and the exporter read all heartbeats, and where nodes come and go under new names
they would grow with the run. They go an hour after their process was last heard of; what is held stays.
"""

import time

import structlog

from tidemill.common.errors import BrokerError
from tidemill.common.process.heartbeats import forget_heartbeats
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import forget_consumers
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.common.wire.messages import Lane

log = structlog.get_logger(__name__)

FORGET_AFTER_S, LOOK_S = 3600.0, 600.0


class Departed:
    """Looks after a run's heartbeats and consumers."""

    def __init__(self, context: ServiceContext) -> None:
        self.context, self._next_look = context, 0.0

    async def forget(self, after_s: float = FORGET_AFTER_S) -> int:
        """Remove what is of processes that were silent for so long, unless this was done lately; how many."""
        if time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + LOOK_S
        broker, keys = self.context.broker, self.context.keys
        try:
            num_gone = await forget_heartbeats(broker, keys, after_s)
            for lane in Lane:
                num_gone += await forget_consumers(broker, keys.prompts(lane), ROLLOUT_GROUP, after_s)
                num_gone += await forget_consumers(broker, keys.trajectories(lane), REWARD_GROUP, after_s)
        except BrokerError as error:  # the users of an older release
            log.info("what killed workers left in Redis stays there", reason=str(error))
            self._next_look = float("inf")
            return 0
        return num_gone
