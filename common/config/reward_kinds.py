"""What every reward that asks servers has in common: which servers, how much of them, and for how long."""

import math
import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tidemill.common.config.section import Section


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


SCORE = "score"
"""Name of the group in a verdict's regular expression, and of what a verdict is called in errors."""


class VerdictConfig(Section):
    """How the judge's words become a number. Words without one are a failed attempt, never 0.

    First `regex` or `json_field` finds the verdict in the words; without either, all of them are. Then
    `choices` gives its value, or it is a number. `function` does all of this itself.
    """

    regex: str = ""
    """Finds the verdict, by its last match that is no quotation: the group `score`, else the first group,
    else all of it. `{nonce}` is the word that the template shows as `{{ nonce }}`: no completion knows it."""
    json_field: str = ""
    """The last JSON object in the words with this field has the verdict; `a.b` is the field `b` of `a`."""
    choices: dict[str, float] = Field(default_factory=dict, max_length=256)
    """Words and their values, such as {A: 1, B: 0}."""
    range: tuple[float, float] | None = None
    """Lowest and highest number that is a verdict; any other is none."""
    to_unit: bool = False
    """Map `range` onto 0 to 1."""
    function: str = ""
    """`path.py:name` of a function from the judge's words to a number, or a dict with `score`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.function and (self.regex or self.json_field or self.choices):
            raise ValueError(
                "function reads the words itself: give no regex, json_field or choices beside it"
            )
        if self.regex and self.json_field:
            raise ValueError("give regex or json_field, not both")
        if self.to_unit and self.range is None:
            raise ValueError("to_unit needs a range")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range must be [lowest, highest], got {list(self.range)}")
        return self

    @field_validator("regex")
    @classmethod
    def _is_a_regex(cls, regex: str) -> str:
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"{regex!r} is no regular expression: {error}") from None
        return regex

    @field_validator("choices")
    @classmethod
    def _values_are_finite(cls, choices: dict[str, float]) -> dict[str, float]:
        if any(not math.isfinite(value) or not label.strip() for label, value in choices.items()):
            raise ValueError("each of the choices needs a word and a finite value")
        return choices


class JudgeConfig(RemoteConfig):
    """A judge behind servers that speak the OpenAI API: hosted ones, or vLLM's of your own."""

    model: str = ""
    """Name of the model in requests; empty takes that of `local_replicas`."""
    api: Literal["chat", "completions"] = "chat"
    """`chat` sends the template's text as the user's message, `completions` as it is."""
    template: str = ""
    """Jinja template of what the judge reads: from prompt and messages (the row's own), prompt_text (what
    the policy read), completion, conversation (messages and all that was said after them, calls of tools and
    their results too), ground_truth, extra, data_source, and nonce, a word that is another one in every
    request."""
    template_file: str = ""
    """Or a file with it, relative to the config; its text is taken when the config is read."""
    system: str = ""
    """Jinja template of the system message of `chat`; empty sends none."""
    temperature: float = Field(0.0, ge=0.0, le=100.0)
    """Of the judge's sampling."""
    max_tokens: int = Field(512, ge=1, le=1_000_000)
    """Most tokens of an answer."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as {seed: 0} or vLLM's own."""
    verdict: VerdictConfig = VerdictConfig()
    """From the judge's words to a number."""
    router_only: bool = False
    """Score nothing: the servers are there for functions that name this reward as their `router`."""

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self.model or (self.local_replicas.model if self.local_replicas else "")

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if not self.template and not self.router_only:
            raise ValueError("a judge needs a template, or a template_file with one")
        if not self.model_name and not self.router_only:
            raise ValueError("a judge needs the name of its model, or local_replicas with one")
        if self.system and self.api != "chat":
            raise ValueError("system belongs to api: chat; put it into the template")
        return self


class RewardModelConfig(RemoteConfig):
    """A classifier that scores sequences or tokens, behind vLLM's pooling API or this project's own server.

    Local replicas run `python -m tidemill.services.reward.model_server`, or vLLM with `server: vllm`.
    """

    server: Literal["transformers", "vllm"] = "transformers"
    """What local replicas run: the reward model server of this project, or vLLM's pooling server."""
    served_name: str = ""
    """Name of the model in requests; empty leaves it out, which suits servers with one model."""
    head: Literal["sequence", "token"] = "sequence"
    """One score for the whole sequence (/classify), or one for every token (/pooling)."""
    input: Literal["ids", "chat", "text"] = "chat"
    """What is sent: the policy's token ids (only where the reward model has the policy's tokenizer), the
    row's own conversation for the reward model's chat template, or as text what the policy read and wrote."""
    label: int = Field(0, ge=0, le=65535)
    """Which of several labels is the reward."""
    token_reward: Literal["last", "mean", "min", "sum", "all_mean"] = "last"
    """How scores of tokens become one: those of the completion; `all_mean` counts the prompt's tokens too.
    With `input: chat` or `text`, where the completion begins is unknown: use `last` or `all_mean`."""
    keep_token_rewards: bool = False
    """Keep the score of every token in the score's detail."""
    normalise: Literal["none", "sigmoid", "standardise", "clip"] = "none"
    """`sigmoid` maps to 0 to 1; `standardise` subtracts `mean` and divides by `std`; `clip` only clips."""
    mean: float = Field(0.0, ge=-1e9, le=1e9)
    """With `standardise`: the mean of raw scores on data of yours. Fixed, so that a score never depends on
    what was scored before it."""
    std: float = Field(1.0, gt=0.0, le=1e9)
    """With `standardise`: their standard deviation."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value after normalisation."""
    max_tokens: int = Field(0, ge=0, le=1 << 20)
    """Longer inputs lose their beginning; 0 refuses what the model cannot take, and never cuts."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine for local replicas, dealt out in turn; empty takes some that nobody has."""
    shares_rollout_gpus: bool = False
    """Local replica i takes turns with rollout worker i on its GPUs: one generates, or the other scores."""
    turn_s: float = Field(5.0, ge=0.05, le=3600.0)
    """With `shares_rollout_gpus`: the longest turn while the other one waits, what is running aside."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip must be [lowest, highest], got {list(self.clip)}")
        if self.normalise == "clip" and self.clip is None:
            raise ValueError("normalise: clip needs clip: [lowest, highest]")
        if self.normalise != "standardise" and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError("mean and std belong to normalise: standardise")
        if self.head == "token" and self.input != "ids" and self.token_reward not in ("last", "all_mean"):
            raise ValueError(
                f"token_reward: {self.token_reward} needs input: ids, because only then is it known which "
                "tokens are the completion's; or take last or all_mean"
            )
        if self.gpus and self.shares_rollout_gpus:
            raise ValueError("give gpus of its own, or shares_rollout_gpus, not both")
        if (self.gpus or self.shares_rollout_gpus) and self.local_replicas is None:
            raise ValueError("gpus and shares_rollout_gpus are about local_replicas, and there are none")
        if self.shares_rollout_gpus and self.server == "vllm":
            raise ValueError("shares_rollout_gpus needs server: transformers, which takes turns by itself")
        return self


class SandboxConfig(Section):
    """Runs the Python code of a completion against the tests in its ground truth, apart from everything else.

    The ground truth is a map or its JSON: `inputs` and `outputs` (standard input and expected output of each
    case; with `fn_name`, arguments and result of that function), `assert_case` (statements), or `test` (code,
    with `entry_point` a function `check`).
    """

    workers: int = Field(1, ge=0, le=1024)
    """RQ workers that `tidemill up` starts on this machine; each runs one completion at a time."""
    score: Literal["all", "fraction"] = "all"
    """1 only where every test passes, or the share of tests that pass."""
    max_cases: int = Field(64, ge=1, le=10_000)
    """Only the first so many tests count."""
    time_s: float = Field(6.0, gt=0.0, le=3600.0)
    """Longest time for one test, in seconds."""
    cpu_s: float = Field(4.0, gt=0.0, le=3600.0)
    """Processor time of one test, in seconds; rounded up to whole ones."""
    total_s: float = Field(30.0, gt=0.0, le=3600.0)
    """Longest time for all tests of a completion together, in seconds."""
    memory_mb: int = Field(512, ge=32, le=1 << 20)
    """Memory of one test, its child processes included, in MiB."""
    file_mb: int = Field(16, ge=1, le=1 << 16)
    """Largest file, and where the kernel allows it all files together, in MiB."""
    max_processes: int = Field(16, ge=1, le=4096)
    """Processes and threads of one test at once."""
    output_kb: int = Field(256, ge=1, le=1 << 16)
    """Longest output of one test, in KiB."""
    isolation: Literal["prefer", "require"] = "require"
    """`require` runs nothing where bubblewrap can make no namespaces; `prefer` has only limits there."""
    packages: bool = False
    """Let the code import the packages that are installed beside this project, such as numpy."""
    queue_s: float = Field(300.0, gt=0.0, le=86_400.0)
    """How long a completion may wait for a free worker, in seconds."""
    result_ttl_s: int = Field(3600, ge=60, le=1_000_000)
    """How long results are kept in Redis, in seconds."""
