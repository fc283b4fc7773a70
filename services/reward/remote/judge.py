"""A reward that asks a language model for its verdict.

One attempt: fill in the template, ask within the run's limits, read a number from the words. Words without a
number are a failed attempt, and what the judge quotes of the completion is no verdict of the judge's. The
words are kept in the score's detail, and tokens are counted whatever came of them, because they are paid for.
"""

import secrets
import time
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.config import NamedRewardConfig
from common.config.reward_kinds import JudgeConfig
from common.errors import ConfigError
from common.wire.messages import Lane
from services.reward.functions.sample import Sample
from services.reward.remote.calls import RemoteCalls, make_calls
from services.reward.remote.faults import RemoteFault
from services.reward.remote.limiter import Permit
from services.reward.remote.openai_requests import Judgement, OpenAIRequests, check_openai
from services.reward.remote.replica import Replica
from services.reward.remote.serving import check_local_replicas
from services.reward.remote.verdict import make_verdict
from services.reward.results.outcome import MAX_DETAIL_CHARS, AttemptError, Outcome, describe

if TYPE_CHECKING:
    from services.reward.rewards.dependencies import RewardServices


Message = dict[str, str]


class JudgePrompt:
    """The templates of one judge."""

    def __init__(self, name: str, config: JudgeConfig) -> None:
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
        self._user = _compiled(environment, config.template, f"reward.rewards.{name}.judge.template")
        self._system = (
            _compiled(environment, config.system, f"reward.rewards.{name}.judge.system")
            if config.system
            else None
        )

    def text(self, sample: Sample, nonce: str = "") -> str:
        """What the judge reads about a sample. `nonce` is a word that no completion can know.

        Raises:
            AttemptError: the template asks for something that the sample does not have.
        """
        return _rendered(self._user, sample, nonce)

    def messages(self, sample: Sample, nonce: str = "") -> list[Message]:
        """The same as a chat."""
        if self._system is None:
            return [{"role": "user", "content": self.text(sample, nonce)}]
        system = {"role": "system", "content": _rendered(self._system, sample, nonce)}
        return [system, {"role": "user", "content": self.text(sample, nonce)}]


def _compiled(environment: ImmutableSandboxedEnvironment, source: str, where: str) -> Template:
    try:
        return environment.from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{where} is no Jinja template: {error}{f' (line {line})' if line else ''}"
        ) from None


def _rendered(template: Template, sample: Sample, nonce: str) -> str:
    fields: dict[str, Any] = {
        "prompt": sample.prompt,
        "messages": sample.chat,
        "prompt_text": sample.prompt_text,
        "completion": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "extra": sample.extra_info,
        "data_source": sample.data_source,
        "nonce": nonce,
    }
    try:
        return template.render(fields)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise AttemptError(
            f"the judge's template cannot be filled in: {describe(error)}; it sees {', '.join(fields)}",
            is_final=True,
            kind="template",
        ) from error


NONCE_BYTES = 4
CHARS_PER_TOKEN = 3
"""For estimates before a request; most languages have more. What was wrong is put right by the answer."""


class JudgeReward:
    """The verdicts of one judge."""

    slots: int | None = None

    def __init__(self, name: str, config: JudgeConfig, calls: RemoteCalls) -> None:
        self.name, self.config, self.calls = name, config, calls
        self._prompt, self._verdict = JudgePrompt(name, config), make_verdict(config.verdict)
        self._requests = OpenAIRequests(config)

    async def score(self, sample: Sample) -> Outcome:
        """One attempt.

        Raises:
            AttemptError: no verdict; mostly a `RemoteFault`.
        """
        if self.config.router_only:
            return Outcome(None)  # not applicable
        nonce = secrets.token_hex(NONCE_BYTES)
        messages = self._prompt.messages(sample, nonce)
        started = time.monotonic()
        judgement = await self.calls.ask(
            lambda replica, permit: self._send(replica, permit, messages),
            Lane.EVAL if sample.is_evaluation else Lane.TRAIN,
            sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN + self.config.max_tokens,
        )
        try:
            outcome = self._verdict(judgement.words, sample.solution_str, nonce)
        except RemoteFault as fault:
            self.calls.count(fault)
            raise
        detail = {
            "judgement": judgement.words[:MAX_DETAIL_CHARS],
            "judge_tokens": judgement.tokens,
            "judge_s": round(time.monotonic() - started, 3),
        }
        return Outcome(outcome.value, outcome.components, {**outcome.detail, **detail})

    async def close(self) -> None:
        """Close connections, and give back what the limits hold for this worker."""
        await self.calls.close()
        await self._requests.close()

    async def _send(self, replica: Replica, permit: Permit, messages: list[Message]) -> Judgement:
        judgement = await self._requests.send(replica, messages)
        permit.used_tokens = judgement.tokens
        self.calls.count_tokens(judgement.prompt_tokens, judgement.completion_tokens)
        return judgement


def make_judge(name: str, config: NamedRewardConfig, services: "RewardServices") -> JudgeReward:
    """The judge called `name`, ready to be asked.

    Raises:
        ConfigError: its template, verdict or key is not as it should be.
    """
    assert config.judge is not None
    check_openai(name, config.judge)
    calls = make_calls(name, config.judge, config.timeout_s, services)
    return JudgeReward(name, config.judge, calls)


def check_judge(name: str, config: NamedRewardConfig) -> None:
    """Find what is wrong with a judge without asking it.

    Raises:
        ConfigError: its template, verdict or key is not as it should be.
    """
    assert config.judge is not None
    check_openai(name, config.judge)
    check_local_replicas(name, config)
    JudgePrompt(name, config.judge)
    make_verdict(config.judge.verdict)
