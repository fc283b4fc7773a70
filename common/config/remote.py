"""What every reward that asks servers has in common: which servers, how much of them, and for how long."""

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from common.config.section import Section


class LimitsConfig(Section):
    """What all reward workers of a run together may ask of one reward's servers; 0 is no limit."""

    concurrency: int = Field(0, ge=0, le=1_000_000)
    """Requests in flight at once."""
    requests_per_minute: float = Field(0.0, ge=0.0, le=1e9)
    """Requests started in a minute."""
    tokens_per_minute: float = Field(0.0, ge=0.0, le=1e12)
    """Tokens in a minute, of prompts and answers; estimated before a request and corrected after it."""
    burst_s: float = Field(2.0, gt=0.0, le=60.0)
    """What this many seconds allow may be used at once; no minute has more than its limit and one burst."""
    evaluation_share: float = Field(0.1, ge=0.0, le=0.9)
    """Share of everything that training leaves to evaluation."""
    lease_s: float = Field(30.0, ge=0.2, le=3600.0)
    """A worker that is silent this long gives back the concurrency that it held."""

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return bool(self.concurrency or self.requests_per_minute or self.tokens_per_minute)


class RoutingConfig(Section):
    """How requests are spread over replicas, and when a replica gets none."""

    health_interval_s: float = Field(2.0, ge=0.05, le=3600.0)
    """Between two looks at each replica's /health, and at which replicas there are."""
    health_timeout_s: float = Field(5.0, gt=0.0, le=600.0)
    """A replica that does not answer /health for this long is down."""
    breaker_failures: int = Field(5, ge=1, le=10_000)
    """Failures in a row after which a replica gets no requests for a while."""
    breaker_cooldown_s: float = Field(5.0, ge=0.01, le=3600.0)
    """How long it gets none; then one request tries it. Doubles up to a minute while that fails."""
    max_failovers: int = Field(2, ge=0, le=64)
    """Further replicas that one attempt asks, one after the other, when a replica fails it."""
    patience_s: float = Field(300.0, ge=0.0, le=86_400.0)
    """How long a sample waits for any replica to be there; models take minutes to load."""
    replica_ttl_s: float = Field(10.0, ge=0.5, le=3600.0)
    """A registered replica that is silent this long is gone; replicas speak at a third of it."""


class PricesConfig(Section):
    """What a reward's servers charge, in a currency of the user's choice."""

    prompt: float = Field(0.0, ge=0.0, le=1e6)
    """A million tokens of prompts."""
    completion: float = Field(0.0, ge=0.0, le=1e6)
    """A million tokens of answers."""

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


class HedgeConfig(Section):
    """A second request for the same sample when the first is slow; the first answer wins."""

    after_s: float | None = Field(None, gt=0.0, le=86_400.0)
    """Seconds after which the second request is sent."""
    quantile: float | None = Field(None, ge=0.5, lt=1.0)
    """Or: when the first takes longer than this share of the last 256 requests did."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.after_s is None) == (self.quantile is None):
            raise ValueError("give after_s or quantile, one of both")
        return self


class LocalReplicasConfig(Section):
    """Servers that `tidemill up` starts on this machine and keeps alive."""

    count: int = Field(1, ge=1, le=64)
    """How many."""
    model: str = Field(min_length=1)
    """Folder or hub name of the model that they serve."""
    command: tuple[str, ...] = ()
    """Another server than vLLM's: its command line, where {host}, {port} and {model} are filled in."""
    args: tuple[str, ...] = ()
    """Further arguments of the server, such as [--enforce-eager]. vLLM on a CPU computes in float32 unless a
    --dtype stands here."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of its environment, such as CUDA_VISIBLE_DEVICES; `{index}` is its number."""
    start_timeout_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """A server that is not healthy this long after its start is started again."""


def check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of servers, without a slash at the end and without credentials."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address such as http://host:8000/v1")
        if parts.username or parts.password:
            raise ValueError("an address holds no credentials: name the variable that does in api_key_env")
    if len(set(urls)) < len(urls):
        raise ValueError("an address is given twice")
    return tuple(url.rstrip("/") for url in urls)


class RemoteConfig(Section):
    """Base of rewards that ask servers."""

    base_urls: tuple[str, ...] = ()
    """Addresses of the servers; replicas that register themselves are used besides them."""
    api_key_env: str = Field("", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$")
    """Name of the environment variable with the servers' key; empty sends none."""
    limits: LimitsConfig = LimitsConfig()
    routing: RoutingConfig = RoutingConfig()
    hedge: HedgeConfig | None = None
    """A second request when the first is slow; off by default."""
    prices: PricesConfig = PricesConfig()
    """For `tidemill_remote_cost_total`: what the reward has cost so far."""
    local_replicas: LocalReplicasConfig | None = None
    """Servers that `tidemill up` starts."""

    @field_validator("base_urls")
    @classmethod
    def _urls_are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return check_urls(urls)
