"""Removes what processes that are gone have left in Redis: where nodes come and go under new names, it would
grow with the run."""

import time

import structlog

from tidemill.common.errors import BrokerError
from tidemill.common.process.heartbeats import forget_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.streams.log import forget_consumers
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Lane

log = structlog.get_logger(__name__)

FORGET_AFTER_S = 3600.0
LOOK_S = 600.0
"""Seconds between two looks."""


class DepartedProcesses:
    def __init__(self, broker: Broker, keys: Keys) -> None:
        self._broker = broker
        self._keys = keys
        self._next_look = 0.0

    async def forget(self, after_s: float = FORGET_AFTER_S) -> int:
        """Remove heartbeats and consumers of processes that were silent for `after_s`, unless this was done
        lately; returns how many. Messages that such a process holds stay."""
        if time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + LOOK_S
        broker = self._broker
        keys = self._keys
        try:
            num_gone = await forget_heartbeats(broker, keys, after_s)
            for lane in Lane:
                num_gone += await forget_consumers(broker, keys.prompts(lane), ROLLOUT_GROUP, after_s)
                num_gone += await forget_consumers(broker, keys.trajectories(lane), REWARD_GROUP, after_s)
        except BrokerError as error:  # Redis users of an older release lack the right
            log.info("what killed workers left in Redis stays there", reason=str(error))
            # Not tried again: this user will not be allowed to in ten minutes either.
            self._next_look = float("inf")
            return 0
        return num_gone
