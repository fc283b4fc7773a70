"""A sandbox run: streams of its own, real reward workers, and nothing that generates or trains.

Guarantees: it shares no key, file or process with the run whose trajectories it is given. Its Redis is
private to its folder unless an address is given.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import yaml

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.files import write_atomically
from tidemill.common.process.heartbeats import GONE_AFTER_S, Heartbeat, read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import CONFIG_FILE, publish_config, run_exists, update_state
from tidemill.common.streams import ensure_group
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Lane
from tidemill.services.console.exports.archive import archive_rest
from tidemill.services.console.launch.local_redis import LocalRedis
from tidemill.services.console.processes.guard import Guard
from tidemill.services.console.processes.service import ServiceSpec, service_environment, service_specs
from tidemill.services.console.processes.supervisor import Supervisor
from tidemill.services.console.run.folder import RunFolder

ROLES = ("reward", "replica", "sandbox")
"""What scores trajectories: workers, the servers of judges and reward models, and workers that run code."""
GRACE_S = 30.0
POLL_S = 0.2


class SandboxRun:
    """`async with sandbox.running():` its Redis and reward workers are up inside."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, url: str | None, on_event: Callable[[str], None]
    ) -> None:
        """`url` is the Redis to use; None starts one of its own."""
        self.config, self.folder, self.url, self.on_event = config, folder, url, on_event
        self.keys = Keys(config.run_id)
        self.broker: Broker
        self._supervisor: Supervisor

    @property
    def specs(self) -> list[ServiceSpec]:
        """The processes that it starts."""
        return [spec for spec in service_specs(self.config) if spec.role in ROLES]

    @contextlib.asynccontextmanager
    async def running(self, source: str) -> AsyncIterator["SandboxRun"]:
        """Start everything, and stop it again; the folder stays. `source` is the run whose history it scores.

        Raises:
            ConfigError: the run exists already, or a reward cannot be loaded.
        """
        self._make_folder()
        with Guard() as guard:
            async with self._redis(guard) as url:
                self.url = url
                self.broker = await Broker.connect(url)
                try:
                    await self._register(source)
                    async with self._workers(guard, url):
                        yield self
                    if self.config.streams.archive.enabled:
                        archive = self.config.streams.archive
                        await archive_rest(self.broker, self.keys, self.folder.path, archive)
                finally:
                    await self.broker.close()

    async def until_ready(self) -> None:
        """Wait until all workers that it starts are up, so that none of their start counts as work."""
        names = {spec.name for spec in self.specs if spec.role == "reward"}
        while True:
            if names <= {beat.name for beat in await read_heartbeats(self.broker, self.keys)}:
                return
            await asyncio.sleep(POLL_S)

    async def final_heartbeats(self) -> list[Heartbeat]:
        """The workers' heartbeats once everything is scored."""
        asked_at, deadline = await self.broker.server_time_s(), time.monotonic() + GONE_AFTER_S
        while True:
            beats = await read_heartbeats(self.broker, self.keys)
            if all(beat.at > asked_at for beat in beats) or time.monotonic() > deadline:
                return beats
            await asyncio.sleep(POLL_S)

    def _make_folder(self) -> None:
        try:
            self.folder.logs.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"{self.folder.path} is there already; give the sandbox another name with --into."
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot make {self.folder.path}: {error.strerror}") from None
        text = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(self.folder.path / CONFIG_FILE, text)

    async def _register(self, source: str) -> None:
        if await run_exists(self.broker, self.keys):
            raise ConfigError(f"this Redis has a run {self.keys.run_id} already; give another with --into.")
        await publish_config(self.broker, self.keys, self.config)
        await update_state(self.broker, self.keys, kind="rescore", source=source)
        for lane in Lane:
            await ensure_group(self.broker, self.keys.trajectories(lane), REWARD_GROUP)

    @contextlib.asynccontextmanager
    async def _redis(self, guard: Guard) -> AsyncIterator[str]:
        if self.url is not None:
            yield self.url
            return
        local = LocalRedis(self.folder, guard, self.on_event)
        try:
            await local.start()
            yield local.url
        finally:
            await local.stop()

    @contextlib.asynccontextmanager
    async def _workers(self, guard: Guard, url: str) -> AsyncIterator[None]:
        """Keep the workers alive; when one cannot do its work, whoever waits inside is told."""
        self._supervisor = Supervisor(
            self.specs,
            env=service_environment(url, self.folder.runs),
            logs=self.folder.logs,
            guard=guard,
            grace_s=GRACE_S,
            is_finished=_never,
            on_event=self.on_event,
        )
        inside = asyncio.current_task()
        keeping = asyncio.create_task(self._supervisor.run())
        failed = False

        def ended(_: asyncio.Task[object]) -> None:
            nonlocal failed
            failed = inside is not None and inside.cancel()

        keeping.add_done_callback(ended)
        try:
            yield
        except asyncio.CancelledError:
            if not failed:
                raise
            outcome = keeping.result()
            kind = ConfigError if outcome.exit_code == ConfigError.exit_code else TidemillError
            raise kind(outcome.reason) from None
        finally:
            keeping.remove_done_callback(ended)
            self._supervisor.stop()
            await asyncio.gather(keeping, return_exceptions=True)


async def _never() -> bool:
    return False
