"""The `servers` section: models behind HTTP, which judges, reward models, teachers and functions name."""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tidemill.common.config.section import Rules, Section, resolved


class LimitsConfig(Section):
    """For all reward workers of a run together; 0 is no limit."""

    concurrency: int = Field(0, ge=0, le=1_000_000)
    """Requests in flight at once."""
    requests_per_minute: float = Field(0.0, ge=0.0, le=1e9)
    """Requests started in a minute."""
    tokens_per_minute: float = Field(0.0, ge=0.0, le=1e12)
    """Tokens in a minute, of prompts and answers."""


class PricesConfig(Section):
    """What the servers charge, in any currency."""

    prompt: float = Field(0.0, ge=0.0, le=1e6)
    """Price of a million tokens of prompts."""
    completion: float = Field(0.0, ge=0.0, le=1e6)
    """Price of a million tokens of answers."""

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


class LocalServersConfig(Section):
    """Servers that `tidemill up` starts on this machine and keeps alive."""

    count: int = Field(1, ge=1, le=64)
    """Number of servers."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """`vllm`, or `transformers` (this project's model server); `auto` takes that for reward models."""
    command: tuple[str, ...] = ()
    """Another server's command line, with {host}, {port} and {model}."""
    args: tuple[str, ...] = ()
    """Further arguments of the server, such as [--enforce-eager]."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables; `{index}` is the server's number."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine; empty takes free ones."""
    shares_rollout_gpus: bool = False
    """Server i and rollout worker i use the same GPUs one at a time; needs `engine: transformers`."""
    start_timeout_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """A server that is not healthy so long after its start is restarted."""

    def rules(self) -> Rules:
        is_sharing = self.shares_rollout_gpus
        if is_sharing and self.gpus:
            yield "give gpus of its own, or shares_rollout_gpus, not both"
        if is_sharing and (self.engine == "vllm" or self.command):
            yield "shares_rollout_gpus needs engine: transformers, which takes turns by itself"


class ServersConfig(Section):
    """Replicas of one model: those of `base_urls`, those of `local`, and those that register themselves."""

    base_urls: tuple[str, ...] = ()
    """Addresses of the servers, such as http://host:8000/v1."""
    model: str = ""
    """Name of the model in requests. Of local servers: folder or hub name."""
    api_key_env: str = Field("", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$")
    """Environment variable with the servers' key; empty sends none."""
    patience_s: float = Field(300.0, ge=0.0, le=86_400.0)
    """How long a sample waits for a usable server."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of all reward workers of the run together."""
    prices: PricesConfig = PricesConfig()
    """For `tidemill_remote_cost_total`: what they have cost so far."""
    local: LocalServersConfig | None = None
    """Servers that `tidemill up` starts."""

    @field_validator("base_urls")
    @classmethod
    def _urls_are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not an address such as http://host:8000/v1")
            if parts.username or parts.password:
                raise ValueError(
                    "an address holds no credentials: name the variable that does in api_key_env"
                )
        if len(set(urls)) < len(urls):
            raise ValueError("an address is given twice")
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="before")
    @classmethod
    def _local_model_is_a_path(cls, tree: Any, info: ValidationInfo) -> Any:
        """Resolve `model` as a path, for local servers only: others may use a name that is a folder here."""
        if not isinstance(tree, dict) or tree.get("local") is None or not isinstance(tree.get("model"), str):
            return tree
        return {**tree, "model": resolved(tree["model"], info)}

    def rules(self) -> Rules:
        if self.local and not self.model:
            yield "local servers need a model: its folder or hub name"
