"""The run's mark in Redis, by which the trainer knows that Redis still holds what it held.

FLUSHALL, a lost AOF or an operator's mistake can empty a Redis that answers as if nothing had happened. The
mark goes with everything else; the config that workers start from is then published again. A copy of the
config is in the run's folder, for a trainer that starts when Redis knows nothing.
"""

import secrets
from pathlib import Path

import structlog
import yaml

from common.config import RunConfig, load_recorded
from common.errors import ConfigError
from common.files import write_atomically
from common.process.service import ServiceContext
from common.redis.broker import Broker
from common.run.state import CONFIG_FILE, RUNNING, publish_config, update_state
from common.wire.keys import Keys

log = structlog.get_logger(__name__)

MARK = "trainer"
"""Field of the run's state: who has marked it."""


class Registration:
    """Marks the run when the trainer starts, and again when everything was lost."""

    def __init__(self, context: ServiceContext) -> None:
        self.broker, self.keys, self.run_dir = context.broker, context.keys, context.run_dir
        self.config = context.registered or context.config
        self._mark = f'"{secrets.token_hex(8)}"'.encode()

    async def begin(self) -> None:
        """Mark the run, and keep its config in its folder."""
        self._keep_config()
        await self._register()

    async def is_lost(self) -> bool:
        """Whether Redis holds the mark no more; it is made again, and the config is published."""
        if await self.broker.execute("HGET", self.keys.state, MARK) == self._mark:
            return False
        log.error("Redis has lost what it held of this run; it is given back all that is needed")
        await self._register()
        await update_state(self.broker, self.keys, status=RUNNING)
        return True

    async def _register(self) -> None:
        await publish_if_lost(self.broker, self.keys, self.config)
        await self.broker.execute("HSET", self.keys.state, MARK, self._mark)

    def _keep_config(self) -> None:
        path = self.run_dir / CONFIG_FILE
        try:
            if load_recorded(path) == self.config:
                return
        except ConfigError:
            pass  # not there yet, or of another release
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False))


async def publish_if_lost(broker: Broker, keys: Keys, config: RunConfig) -> None:
    """Publish the config of a run that Redis does not know any more."""
    if await broker.execute("GET", keys.config) is None:
        await publish_config(broker, keys, config.model_copy(update={"run_id": keys.run_id}))


TERM_FILE = "trainer.term"
"""Below the run's folder: the number of the newest trainer process."""


def next_term(run_dir: Path) -> int:
    """A number greater than that of every trainer process before.

    Raises:
        StorageError: it cannot be written; call again.
    """
    path = run_dir / TERM_FILE
    try:
        term = int(path.read_text()) + 1
    except (FileNotFoundError, ValueError):
        term = 1
    write_atomically(path, f"{term}\n")
    return term
