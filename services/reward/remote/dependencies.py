"""Objects that the rewards of a worker share: Redis, an HTTP client, servers and their routers.

Modules that ask servers are imported at first use: many runs have no servers, and importing them delays the
start of a worker.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import Reporter
from tidemill.common.process.replicas import read_replicas
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import folder_with_pictures, read_state
from tidemill.common.wire.keys import Keys

if TYPE_CHECKING:
    import httpx

    from tidemill.services.reward.pictures import PictureReader
    from tidemill.services.reward.remote.router import RouterProxy
    from tidemill.services.reward.remote.servers import Servers


@dataclass(slots=True)
class RewardDependencies:
    """Shared by all rewards of one worker; its creator closes it.

    Example: of the worker "reward-0": once a judge has asked for `servers("judge")`, these are kept for the
    next that asks, and `reporters` ends with their `report`.
    """

    config: RunConfig
    broker: Broker
    keys: Keys
    worker: str
    reporters: list[Reporter] = field(default_factory=list)
    """Functions that fill in the worker's heartbeat."""
    pictures: "PictureReader | None" = None
    """Reads the pictures of samples; None in a run without `images`."""
    _http: "httpx.AsyncClient | None" = None
    """Without limits of its own: `Servers` limit requests. Its connections are shared."""
    _servers: "dict[str, Servers]" = field(default_factory=dict)
    _proxies: "dict[str, RouterProxy]" = field(default_factory=dict)

    @classmethod
    def of(cls, context: ServiceContext) -> "RewardDependencies":
        return cls(context.config, context.broker, context.keys, context.name, reporters=context.reporters)

    async def open_pictures(self, context: ServiceContext) -> None:
        """Let rewards read the pictures of the run, or of the run whose history is scored again.

        Raises:
            ConfigError: the store of pictures cannot be opened.
        """
        if self.config.images is None:
            return
        # Imported here: most runs have no pictures.
        from tidemill.common.images.store import ImageStore
        from tidemill.services.reward.pictures import PictureReader

        run_dir = folder_with_pictures(context.run_dir, await read_state(self.broker, self.keys))
        store = ImageStore(run_dir, self.config.streams.claim_check_url)
        self.pictures = PictureReader(store, context.fail)

    def servers(self, name: str) -> "Servers":
        """The servers of one section, shared by all that ask them. Raises ConfigError: there are none."""
        import httpx

        from tidemill.services.reward.remote.limiter import Limiter
        from tidemill.services.reward.remote.servers import Servers

        if name not in self.config.servers:
            names = ", ".join(self.config.servers) or "none"
            raise ConfigError(f"no servers are called {name!r}; the section servers has {names}")
        if name not in self._servers:
            config = self.config.servers[name]
            registered = partial(read_replicas, self.broker, self.keys, name)
            limiter = Limiter(self.broker, self.keys, name, config.limits)
            self._http = self._http or httpx.AsyncClient(timeout=None, limits=httpx.Limits())
            self._servers[name] = Servers(name, config, self._http, limiter, registered)
            self.reporters.append(self._servers[name].report)
        return self._servers[name]

    async def router_address(self, name: str) -> str:
        """`host:port` of a router of these servers; functions get it as `reward_router_address`.

        Raises:
            ConfigError: there are no such servers.
        """
        from tidemill.services.reward.remote.router import RouterProxy

        if name not in self._proxies:
            asking = [reward for reward in self.config.reward.named.values() if reward.router == name]
            timeout_s = max((reward.timeout_s for reward in asking), default=self.config.reward.timeout_s)
            proxy = RouterProxy(self.servers(name), timeout_s)
            # It does not suspend, so no other call starts one meanwhile. One that cannot listen is not kept.
            await proxy.start()
            self._proxies[name] = proxy
        return self._proxies[name].address

    async def close(self) -> None:
        """Close the routers, the servers' watches and the client's connections."""
        for proxy in self._proxies.values():
            # From the outside in: proxies ask the servers, and servers use the client.
            await proxy.close()
        for servers in self._servers.values():
            await servers.close()
        if self._http is not None:
            await self._http.aclose()
        if self.pictures is not None:
            await self.pictures.close()
