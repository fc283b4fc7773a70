"""Servers of one address, without a run around them."""

from types import SimpleNamespace
from typing import Any

import httpx

from tidemill.common.config import RewardConfig, ServersConfig
from tidemill.common.config.servers import LimitsConfig
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.remote.limiter import Limiter
from tidemill.services.reward.remote.servers import Servers


class _NoKeys:
    """Without limits, no key is used."""

    def limits(self, servers: str) -> str:
        return servers

    requests = limits


def servers_at(url: str, http: httpx.AsyncClient, **fields: Any) -> Servers:
    config = ServersConfig.model_validate({"base_urls": [url], **fields})
    limiter = Limiter(None, _NoKeys(), "there", LimitsConfig())  # type: ignore[arg-type]
    return Servers("there", config, http, limiter)


def dependencies_of(servers: Any, **reward: Any) -> Any:
    """The dependencies of a reward that uses these servers."""
    config = SimpleNamespace(reward=RewardConfig(**reward))
    return SimpleNamespace(servers=lambda _: servers, config=config)


async def announce_replica(broker: Broker, keys: Keys, servers: str, url: str) -> Heartbeat:
    """Publish the heartbeat of a replica that takes requests at `url`; returns it."""
    beat = Heartbeat(f"replica-{url}", "replica", servers=servers, url=url)
    await publish_heartbeat(broker, keys, beat)
    return beat
