"""What benchmarks of real services share: Redis's clock, which no load on this process delays."""

from tests.support.runs import ServiceRun
from tests.support.waiting import wait_until
from tidemill.common.streams import last_id, length


async def redis_time_s(run: ServiceRun) -> float:
    """Now, by the clock of the run's Redis."""
    seconds, microseconds = await run.broker.execute("TIME")
    return int(seconds) + int(microseconds) / 1e6


async def time_of_entry(run: ServiceRun, key: str, number: int, timeout_s: float = 3600.0) -> float:
    """Wait until the stream has so many entries; when the last one was appended, by the same clock."""

    async def is_there() -> bool:
        return await length(run.broker, key) >= number

    await wait_until(is_there, timeout_s)
    return int((await last_id(run.broker, key)).partition("-")[0]) / 1000
