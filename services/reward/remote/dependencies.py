"""What rewards may use beside their own config: Redis, an HTTP client, requests to servers, routers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from tidemill.common.config import RunConfig
from tidemill.common.config.reward_kinds import RemoteConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import Reporter
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.remote.calls import RemoteCalls
from tidemill.services.reward.remote.limiter import Limiter
from tidemill.services.reward.remote.router import Router
from tidemill.services.reward.remote.router_proxy import RouterProxies


async def no_router(name: str) -> str:
    """The address book of a worker without routers."""
    raise ConfigError(f"no router is called {name!r} in this worker; name a judge of reward.rewards")


@dataclass(slots=True)
class RewardDependencies:
    """Shared by all rewards of one worker; whoever makes it closes it."""

    config: RunConfig
    broker: Broker
    keys: Keys
    worker: str
    router_address: Callable[[str], Awaitable[str]] = no_router
    """Gives `host:port` of the router of a judge by its name; functions get it as `reward_router_address`."""
    http: httpx.AsyncClient = field(
        default_factory=lambda: httpx.AsyncClient(timeout=None, limits=httpx.Limits())
    )
    """Without limits of its own: every reward has its own. Its connections are shared."""
    reporters: list[Reporter] = field(default_factory=list)
    """Fill in the worker's heartbeat."""
    calls: dict[str, RemoteCalls] = field(default_factory=dict)
    """The requests of each reward that asks servers, by its name."""
    proxies: RouterProxies | None = None

    @classmethod
    def of(cls, context: ServiceContext) -> "RewardDependencies":
        """Those of a running worker."""
        made = cls(context.config, context.broker, context.keys, context.name, reporters=context.reporters)
        made.proxies = RouterProxies(made.calls, made.http)
        made.router_address = made.proxies.address
        return made

    def make_calls(self, name: str, config: RemoteConfig, timeout_s: float) -> RemoteCalls:
        """The requests of the reward `name`, of which the worker's heartbeat tells."""
        registry = ReplicaRegistry(self.broker, self.keys, name, config.routing.replica_ttl_s)
        router = Router(name, config.base_urls, config.routing, self.http, registry)
        limiter = Limiter(self.broker, self.keys, name, config.limits)
        calls = RemoteCalls(name, router, limiter, timeout_s, config.hedge, config.api_key_env, config.prices)
        self.reporters.append(calls.report)
        self.calls[name] = calls
        return calls

    async def close(self) -> None:
        """Close the routers and the client's connections."""
        if self.proxies is not None:
            await self.proxies.close()
        await self.http.aclose()
