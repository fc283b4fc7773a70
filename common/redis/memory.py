"""How much of its memory Redis uses."""

from dataclasses import dataclass

from tidemill.common.redis.broker import Broker

NO_EVICTION = "noeviction"
REFUSING_SHARE = 0.99
"""Of maxmemory: Redis refuses what is larger than what is left, heartbeats among it."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What Redis uses of what it may use."""

    used_bytes: int
    max_bytes: int
    policy: str = NO_EVICTION

    @property
    def share(self) -> float:
        """Between 0 and 1, or a little more; 0 where there is no limit."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def is_full(self) -> bool:
        """Whether writers are refused, or are about to be."""
        return self.share >= REFUSING_SHARE


async def read_memory(broker: Broker) -> MemoryUse:
    """As Redis itself counts it: buffers of the AOF and of replicas are beside the limit."""
    info = await broker.info("memory")
    counted = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
    return MemoryUse(counted, int(info["maxmemory"]), info.get("maxmemory_policy", NO_EVICTION))
