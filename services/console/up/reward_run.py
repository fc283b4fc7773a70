"""A run of rewards alone: streams of its own and real reward workers, without rollout and trainer.

Guarantees: it shares no key, file or process with another run. Its Redis is private to its folder unless an
address is given.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, TidemillError, first_cause
from tidemill.common.process.heartbeats import GONE_AFTER_S, Heartbeat, read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import RUNNING, STOPPED, publish_config, run_exists, update_state
from tidemill.common.streams import ensure_group
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Lane
from tidemill.services.console.look.archive import archive_rest
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.run.local_redis import open_redis
from tidemill.services.console.up.specs import service_environment, service_specs
from tidemill.services.console.up.supervisor import Ending, Supervisor

ROLES = ("reward", "replica", "sandbox")
"""What scores trajectories: workers, the servers of judges and reward models, and workers that run code."""
GRACE_S = 30.0
POLL_S = 0.2
STATE_S = 5.0
"""Timeout of the write of the run's end: Redis may be what failed."""


class RewardRun:
    """`async with run.running(kind="...") as broker:` its Redis and reward workers are up inside."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        url: str | None,
        on_event: Callable[[str], None],
        *,
        is_sandbox: bool = True,
    ) -> None:
        """`url` is the Redis to use; None starts a private one. A sandbox needs a new run id, and does not
        become runs/latest."""
        self.config = config
        self.folder = folder
        self.url = url
        self.on_event = on_event
        self.is_sandbox = is_sandbox
        self.env: dict[str, str] = {}
        """Environment variables of its processes, once it is running."""
        self.keys = Keys(config.run_id)
        self.specs = [spec for spec in service_specs(config) if spec.role in ROLES]
        self._supervisor = Supervisor(
            self.specs, folder.logs, GRACE_S, on_event, lease_s=config.streams.lease_s
        )

    @contextlib.asynccontextmanager
    async def running(self, **state: str) -> AsyncIterator[Broker]:
        """Start everything, and stop it again; the folder stays. `state` is added to the run's state.

        Raises:
            ConfigError: the run exists already, or a reward cannot be loaded.
        """
        self.folder.create(self.config, is_sandbox=self.is_sandbox)
        archive = self.config.streams.archive
        with Guard() as guard:
            redis = open_redis(self.url or "", self.folder, guard, self.on_event, self._supervisor.fail)
            async with redis as (url, broker):
                if self.is_sandbox and await run_exists(broker, self.keys):
                    run_id = self.keys.run_id
                    raise ConfigError(f"this Redis has a run {run_id} already; give another with --into.")
                await self.register(broker)
                await update_state(broker, self.keys, status=RUNNING, **state)
                self.env = service_environment(url, self.folder.runs)
                try:
                    async with self._workers(guard):
                        yield broker
                finally:
                    # Workers that were started by hand leave after a while.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(STATE_S):
                            await update_state(broker, self.keys, status=STOPPED)
                # After the workers' end, for until then they write, and before Redis stops.
                if archive.enabled:
                    await archive_rest(broker, self.keys, self.folder.path, archive)

    async def until_ready(self, broker: Broker) -> None:
        """Wait until all its reward workers are up, so that their start-up does not count as work."""
        names = {spec.name for spec in self.specs if spec.role == "reward"}
        # Without a limit: where a worker cannot start, `_workers` ends this.
        while True:
            if names <= {beat.name for beat in await read_heartbeats(broker, self.keys)}:
                return
            await asyncio.sleep(POLL_S)

    async def final_heartbeats(self, broker: Broker) -> list[Heartbeat]:
        """The workers' heartbeats once everything is scored."""
        # By Redis's clock, by which heartbeats are dated.
        asked_at = await broker.server_time_s()
        deadline = time.monotonic() + GONE_AFTER_S
        while True:
            beats = await read_heartbeats(broker, self.keys)
            if all(beat.at > asked_at for beat in beats) or time.monotonic() > deadline:
                return beats
            await asyncio.sleep(POLL_S)

    async def register(self, broker: Broker) -> None:
        """Write to Redis what workers need to find there; idempotent."""
        # Before any worker starts: it reads its config there.
        await publish_config(broker, self.keys, self.config)
        # Made before the first entry, so that workers get it whenever they join.
        for lane in Lane:
            await ensure_group(broker, self.keys.trajectories(lane), REWARD_GROUP)

    @contextlib.asynccontextmanager
    async def _workers(self, guard: Guard) -> AsyncIterator[None]:
        """Keep the workers alive; if one cannot do its work, the block is cancelled and raises that error."""

        async def keep() -> None:
            outcome = await self._supervisor.run(self.env, guard)
            if outcome.ending is Ending.FAILED:
                is_mistake = outcome.exit_code == ConfigError.exit_code
                raise (ConfigError if is_mistake else TidemillError)(outcome.reason)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(keep())
                yield
                # It ends `keep`, for which the task group waits.
                self._supervisor.stop()
        except ExceptionGroup as errors:
            # A task group raises a group; callers catch errors by their class.
            raise first_cause(errors) from None
