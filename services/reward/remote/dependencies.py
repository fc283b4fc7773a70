"""What rewards may use beside their own config: Redis, an HTTP client, servers and their routers."""

from dataclasses import dataclass, field

import httpx

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import Reporter
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.remote.limiter import Limiter
from tidemill.services.reward.remote.router_proxy import RouterProxy
from tidemill.services.reward.remote.servers import Servers


@dataclass(slots=True)
class RewardDependencies:
    """Shared by all rewards of one worker; whoever makes it closes it."""

    config: RunConfig
    broker: Broker
    keys: Keys
    worker: str
    http: httpx.AsyncClient = field(
        default_factory=lambda: httpx.AsyncClient(timeout=None, limits=httpx.Limits())
    )
    """Without limits of its own: servers have theirs. Its connections are shared."""
    reporters: list[Reporter] = field(default_factory=list)
    """Fill in the worker's heartbeat."""
    _servers: dict[str, Servers] = field(default_factory=dict)
    _proxies: dict[str, RouterProxy] = field(default_factory=dict)

    @classmethod
    def of(cls, context: ServiceContext) -> "RewardDependencies":
        """Those of a running worker."""
        return cls(context.config, context.broker, context.keys, context.name, reporters=context.reporters)

    def servers(self, name: str) -> Servers:
        """The servers of one section, shared by all that ask them. Raises ConfigError: there are none."""
        if name not in self.config.servers:
            known = ", ".join(self.config.servers) or "none"
            raise ConfigError(f"no servers are called {name!r}; the section servers has {known}")
        if name not in self._servers:
            config = self.config.servers[name]
            registry = ReplicaRegistry(self.broker, self.keys, name)
            limiter = Limiter(self.broker, self.keys, name, config.limits)
            self._servers[name] = Servers(name, config, self.http, limiter, registry)
            self.reporters.append(self._servers[name].report)
        return self._servers[name]

    async def router_address(self, name: str) -> str:
        """`host:port` of a router of these servers; functions get it as `reward_router_address`.

        Raises:
            ConfigError: there are no such servers.
        """
        if name not in self._proxies:
            asking = [reward for reward in self.config.reward.named.values() if reward.router == name]
            timeout_s = max((reward.timeout_s for reward in asking), default=self.config.reward.timeout_s)
            self._proxies[name] = proxy = RouterProxy(self.servers(name), timeout_s)
            await proxy.start()
        return self._proxies[name].address

    async def close(self) -> None:
        """Close the routers, the servers' watches and the client's connections."""
        for proxy in self._proxies.values():
            await proxy.close()
        for servers in self._servers.values():
            await servers.close()
        await self.http.aclose()
