"""A reward that asks a language model for its verdict, through OpenAI's client.

One attempt: fill in the template, ask within the run's limits, read a number from the words. Words without a
number are a failed attempt, and what the judge quotes of the completion is no verdict of the judge's. The
words are kept in the score's detail, and tokens are counted whatever came of them, because they are paid for.
"""

import importlib.util
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import JudgeConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.replicas import key_for
from tidemill.common.wire.codec import sendable
from tidemill.services.reward.functions.processes.pool import execution_of
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.outcome import MAX_DETAIL_CHARS, AttemptError, RewardOutcome
from tidemill.services.reward.remote.calls import RemoteCalls
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import (
    CHARS_PER_TOKEN,
    SHOWN_CHARS,
    FaultKind,
    RemoteFault,
    check_key,
    connection_fault,
    status_fault,
)
from tidemill.services.reward.remote.limiter import Permit
from tidemill.services.reward.remote.router import Replica
from tidemill.services.reward.remote.serving import check_local_replicas
from tidemill.services.reward.remote.templates import compiled, rendered
from tidemill.services.reward.remote.verdict import NONCE, Reading, make_verdict, unread
from tidemill.services.reward.sample import RewardSample

if TYPE_CHECKING:
    from openai import AsyncOpenAI

WHOSE = "the judge's"
NONCE_BYTES = 4
NO_KEY = "none"
REGEX_PROCESSES = 2
"""One is busy with an expression that takes long, while the other reads."""

ChatMessage = dict[str, str]


class JudgePrompt:
    """The templates of one judge."""

    def __init__(self, name: str, config: JudgeConfig) -> None:
        where = f"reward.rewards.{name}.judge"
        self._user = compiled(config.template, f"{where}.template")
        self._system = compiled(config.system, f"{where}.system") if config.system else None

    def text(self, sample: RewardSample, nonce: str = "") -> str:
        """What the judge reads about a sample. `nonce` is a word that no completion can know.

        Raises:
            AttemptError: the template asks for something that the sample does not have.
        """
        return rendered(self._user, sample, WHOSE, nonce)

    def messages(self, sample: RewardSample, nonce: str = "") -> list[ChatMessage]:
        """The same as a chat."""
        user = {"role": "user", "content": self.text(sample, nonce)}
        if self._system is None:
            return [user]
        return [{"role": "system", "content": rendered(self._system, sample, WHOSE, nonce)}, user]


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """The words of a judge, and what they cost."""

    words: str
    prompt_tokens: int
    completion_tokens: int
    is_cut: bool = False
    """Whether `max_tokens` ended it."""

    @property
    def tokens(self) -> int:
        """All that count towards a limit."""
        return self.prompt_tokens + self.completion_tokens


class OpenAIRequests:
    """Sends a judge's requests, by one client for all replicas, so that they share connections.

    The client's own retries are off: limits, other replicas, pauses and attempts are decided around it.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._clients: dict[str, AsyncOpenAI] = {}
        self._first: AsyncOpenAI | None = None

    async def send(self, replica: Replica, messages: list[ChatMessage]) -> JudgeAnswer:
        """One request, without limits of its own.

        Raises:
            RemoteFault: there was no answer, or none of this API.
        """
        import openai

        try:
            answer = await self._create(self._client(replica), messages)
        except openai.APIStatusError as error:
            raise status_fault(
                replica.origin, error.status_code, error.response.headers, error.message
            ) from error
        except openai.APIResponseValidationError as error:
            raise _garbage(replica, str(error)) from error
        except openai.APIError as error:
            raise connection_fault(replica.origin, error.__cause__ or error) from error
        except (ValueError, TypeError, AttributeError) as error:  # the client could not read it
            raise _garbage(replica, str(error)) from error
        return self._read(replica, answer)

    async def close(self) -> None:
        """Close all connections."""
        if self._first is not None:
            await self._first.close()

    async def _create(self, client: "AsyncOpenAI", messages: list[ChatMessage]) -> Any:
        config = self._config
        options: dict[str, Any] = {
            "model": config.model_name,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "extra_body": config.extra_body or None,
        }
        if config.api == "completions":
            return await client.completions.create(prompt=messages[-1]["content"], **options)
        return await client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]

    def _client(self, replica: Replica) -> "AsyncOpenAI":
        if (known := self._clients.get(replica.url)) is not None:
            return known
        import httpx2  # what the openai client is built on
        import openai

        if self._first is None:
            # Unbounded, because the limits are elsewhere: a pool of its own would be another queue.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
            http = openai.DefaultAsyncHttpxClient(timeout=None, limits=limits)
            self._first = openai.AsyncOpenAI(
                base_url=replica.url, api_key=NO_KEY, max_retries=0, timeout=None, http_client=http
            )
        key = key_for(replica.url, replica.is_registered, self._config.api_key_env) or NO_KEY
        self._clients[replica.url] = self._first.with_options(base_url=replica.url, api_key=key)
        return self._clients[replica.url]

    def _read(self, replica: Replica, answer: Any) -> JudgeAnswer:
        """Take nothing for granted: the client checks no types."""
        try:
            choice = answer.choices[0]
            words = choice.text if self._config.api == "completions" else choice.message.content
            if words is None:
                words = ""  # a model that said nothing, or refused: no verdict, but an answer
            usage = answer.usage
            counts = (int(usage.prompt_tokens), int(usage.completion_tokens)) if usage else (0, 0)
            is_cut = getattr(choice, "finish_reason", None) == "length"
        except (AttributeError, LookupError, TypeError, ValueError):
            raise _garbage(replica, str(answer)) from None
        if not isinstance(words, str):
            raise _garbage(replica, f"choices[0] holds {type(words).__name__} in place of text")
        return JudgeAnswer(sendable(words), *counts, is_cut)


def _garbage(replica: Replica, said: str) -> RemoteFault:
    shown = " ".join(said.split())[:SHOWN_CHARS]
    return RemoteFault(FaultKind.GARBAGE, f"{replica.origin} answered what is no completion: {shown}")


class JudgeReward:
    """The verdicts of one judge."""

    slots: int | None = None

    def __init__(
        self,
        name: str,
        config: JudgeConfig,
        calls: RemoteCalls,
        timeout_s: float,
        num_processes: int = 1,
        threads: int = 1,
    ) -> None:
        self.name, self.config, self.calls, self._timeout_s = name, config, calls, timeout_s
        self._prompt = JudgePrompt(name, config)
        most = num_processes if config.verdict.function else min(num_processes, REGEX_PROCESSES)
        self._reading = execution_of(Reading(name, config.verdict), most, threads)
        self._requests = OpenAIRequests(config)

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """One attempt. Raises AttemptError: no verdict; mostly a `RemoteFault`."""
        if self.config.router_only:
            return RewardOutcome(None)  # not applicable
        nonce = secrets.token_hex(NONCE_BYTES)
        messages = self._prompt.messages(sample, nonce)
        started = time.monotonic()
        answer = await self.calls.ask(
            lambda replica, permit: self._send(replica, permit, messages),
            sample.lane,
            sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN + self.config.max_tokens,
        )
        outcome = await self._read(answer, sample, nonce)
        detail = {
            "judgement": answer.words[:MAX_DETAIL_CHARS],
            "judge_tokens": answer.tokens,
            "judge_s": round(time.monotonic() - started, 3),
        }
        return RewardOutcome(outcome.value, outcome.components, {**outcome.detail, **detail})

    async def close(self) -> None:
        """Close connections, and give back what the limits hold for this worker."""
        await self._reading.close()
        await self.calls.close()
        await self._requests.close()

    async def _read(self, answer: JudgeAnswer, sample: RewardSample, nonce: str) -> RewardOutcome:
        """The verdict. A user's regex or function reads it in a scoring process, within `timeout_s`."""
        given = {"words": answer.words, "nonce": nonce, "is_cut": answer.is_cut}
        try:
            (outcome,) = await self._reading.run(Request([sample], given), self._timeout_s)
        except AttemptError as error:
            fault = unread(answer.words, error)
            self.calls.count(fault)
            raise fault from None
        return outcome

    async def _send(self, replica: Replica, permit: Permit, messages: list[ChatMessage]) -> JudgeAnswer:
        answer = await self._requests.send(replica, messages)
        permit.used_tokens = answer.tokens
        self.calls.count_tokens(answer.prompt_tokens, answer.completion_tokens)
        return answer


def make_judge(name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> JudgeReward:
    """The judge called `name`, ready to be asked; raises as `check_judge` does."""
    assert config.judge is not None
    _check_client(name, config.judge)
    calls = dependencies.make_calls(name, config.judge, config.timeout_s)
    section = dependencies.config.reward
    return JudgeReward(name, config.judge, calls, config.timeout_s, section.processes, section.threads)


def check_judge(name: str, config: NamedRewardConfig) -> None:
    """Find what is wrong with a judge without asking it.

    Raises:
        ConfigError: its template, verdict or key is not as it should be, or the client is not installed.
    """
    assert config.judge is not None
    _check_client(name, config.judge)
    check_local_replicas(name, config)
    JudgePrompt(name, config.judge)
    make_verdict(config.judge.verdict)
    if not config.judge.router_only:
        _check_template(name, config.judge)


def _check_template(name: str, config: JudgeConfig) -> None:
    """See that the judge is shown what it judges, and the nonce where its verdict is read by it."""
    parsed = [ImmutableSandboxedEnvironment().parse(text) for text in (config.template, config.system)]
    shown = {each for tree in parsed for each in find_undeclared_variables(tree)}
    where = f"reward.rewards.{name}.judge.template"
    if "completion" not in shown:
        raise ConfigError(
            f"{where} does not show the judge the completion: put {{{{ completion }}}} where it should be"
        )
    if NONCE in config.verdict.regex + config.verdict.json_field and "nonce" not in shown:
        raise ConfigError(
            f"{where} does not show the nonce by which the verdict is read: ask in it for a line such as "
            f"'Score {{{{ nonce }}}}: N', or take {NONCE} out of the verdict"
        )


def _check_client(name: str, config: JudgeConfig) -> None:
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            f"reward {name} is a judge, which needs the openai client: pip install 'tidemill[reward]'"
        )
    check_key(name, config.api_key_env, "judge.api_key_env")
