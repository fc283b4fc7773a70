"""What rewards may use beside their own config: the run's Redis, an HTTP client, addresses of routers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from common.config import RunConfig
from common.errors import ConfigError
from common.process.heartbeats import Reporter
from common.process.service import ServiceContext
from common.redis.broker import Broker
from common.wire.keys import Keys

if TYPE_CHECKING:
    from services.reward.remote.calls import RemoteCalls
    from services.reward.remote.router_proxy import RouterProxies

RouterAddress = Callable[[str], Awaitable[str]]


async def no_router(name: str) -> str:
    """The address book of a worker without routers."""
    raise ConfigError(f"no router is called {name!r} in this worker; name a judge of reward.rewards")


@dataclass(slots=True)
class RewardServices:
    """Shared by all rewards of one worker; whoever makes it closes it."""

    config: RunConfig
    broker: Broker
    keys: Keys
    worker: str
    router_address: RouterAddress = no_router
    """Gives `host:port` of the router of a judge by its name; functions get it as `reward_router_address`."""
    http: httpx.AsyncClient = field(
        default_factory=lambda: httpx.AsyncClient(timeout=None, limits=httpx.Limits())
    )
    """Without limits of its own: every reward has its own. Its connections are shared."""
    reporters: list[Reporter] = field(default_factory=list)
    """Fill in the worker's heartbeat."""
    calls: "dict[str, RemoteCalls]" = field(default_factory=dict)
    """The requests of each reward that asks servers, by its name; the rewards enter themselves."""
    proxies: "RouterProxies | None" = None

    @classmethod
    def of(cls, context: ServiceContext) -> "RewardServices":
        """Those of a running worker."""
        from services.reward.remote.router_proxy import RouterProxies

        services = cls(context.config, context.broker, context.keys, context.name)
        services.reporters = context.reporters
        services.proxies = RouterProxies(services.calls, services.http)
        services.router_address = services.proxies.address
        return services

    async def close(self) -> None:
        """Close the routers and the client's connections."""
        if self.proxies is not None:
            await self.proxies.close()
        await self.http.aclose()
