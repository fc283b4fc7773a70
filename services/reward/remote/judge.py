"""A reward that asks a language model for its verdict, in OpenAI's API.

One attempt: fill in the template, ask within the run's limits, read a number from the words. Words without a
number are a failed attempt, and what the judge quotes of the completion is no verdict of the judge's. The
words are kept in the score's detail, and tokens are counted whatever came of them, because they are paid for.
"""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.common.config import NamedRewardConfig, ServersConfig
from tidemill.common.config.reward_kinds import JudgeConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.codec import sendable
from tidemill.services.reward.functions.pool import Execution
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.outcome import MAX_DETAIL_CHARS, AttemptError, Reward, RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import CHARS_PER_TOKEN
from tidemill.services.reward.remote.servers import usage_of
from tidemill.services.reward.remote.templates import SampleTemplate
from tidemill.services.reward.remote.verdict import NONCE, Verdict, unread
from tidemill.services.reward.sample import ChatMessages, RewardSample, lines_of

NONCE_BYTES = 4
REGEX_PROCESSES = 2
"""One is busy with an expression that takes long, while the other reads."""


class JudgePrompt:
    def __init__(self, name: str, config: JudgeConfig) -> None:
        where = f"reward.rewards.{name}.judge"
        self._user = SampleTemplate(config.template, f"{where}.template")
        self._system = SampleTemplate(config.system, f"{where}.system") if config.system else None

    def messages(self, sample: RewardSample, nonce: str = "") -> ChatMessages:
        """What the judge reads about a sample, as a chat; the user's message comes last.

        Raises:
            AttemptError: a template asks for something that the sample does not have.
        """
        system = self._system.render(sample, nonce) if self._system else ""
        user = {"role": "user", "content": self._user.render(sample, nonce)}
        return [{"role": "system", "content": system}, user] if self._system else [user]


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """The words of a judge, and how many tokens they cost."""

    words: str
    tokens: int = 0
    is_cut: bool = False
    """Whether `max_tokens` ended it."""


def read_answer(answer: dict[str, Any], api: str) -> JudgeAnswer:
    """The judge's answer in one of the completions or chat API.

    Raises:
        ValueError: it holds no text, or not in the right place.
    """
    choice = answer["choices"][0]
    words = choice["text"] if api == "completions" else choice["message"].get("content")
    if words is None:
        words = ""  # a model that said nothing, or refused: no verdict, but an answer
    if not isinstance(words, str):
        raise ValueError(f"choices[0] holds {type(words).__name__} in place of text")
    return JudgeAnswer(sendable(words), sum(usage_of(answer)), choice.get("finish_reason") == "length")


class JudgeReward(Reward):
    def __init__(self, name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> None:
        assert config.judge is not None
        self.config, self._timeout_s = config.judge, config.timeout_s
        self.servers = dependencies.servers(config.servers)
        self._prompt = JudgePrompt(name, config.judge)
        section, verdict = dependencies.config.reward, config.judge.verdict
        most = section.processes if verdict.function else min(section.processes, REGEX_PROCESSES)
        self._reading = Execution(Verdict(name, verdict), most, section.threads)

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """One attempt. Raises AttemptError: no verdict; mostly a `RemoteFault`."""
        nonce = secrets.token_hex(NONCE_BYTES)
        messages = self._prompt.messages(sample, nonce)
        started = time.monotonic()
        answer = await self._ask(messages, sample)
        given = {"words": answer.words, "nonce": nonce, "is_cut": answer.is_cut}
        try:  # a user's regex or function reads it in a scoring process, within `timeout_s`
            (outcome,) = await self._reading.run(Request([sample], given), self._timeout_s)
        except AttemptError as error:
            fault = unread(answer.words, error)
            self.servers.count(fault)
            raise fault from None
        detail = {
            "judgement": answer.words[:MAX_DETAIL_CHARS],
            "judge_tokens": answer.tokens,
            "judge_s": round(time.monotonic() - started, 3),
        }
        return RewardOutcome(outcome.value, outcome.components, {**outcome.detail, **detail})

    async def close(self) -> None:
        """End the processes that read verdicts; the dependencies close the servers."""
        await self._reading.close()

    async def _ask(self, messages: ChatMessages, sample: RewardSample) -> JudgeAnswer:
        config = self.config
        body: dict[str, Any] = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        if config.api == "completions":
            body["prompt"] = messages[-1]["content"]
        else:
            body["messages"] = messages
        return await self.servers.ask_json(
            "completions" if config.api == "completions" else "chat/completions",
            body | config.extra_body,
            lambda answer: read_answer(answer, config.api),
            lane=sample.lane,
            tokens=sum(len(one["content"]) for one in messages) // CHARS_PER_TOKEN + config.max_tokens,
            timeout_s=self._timeout_s,
        )


def check_judge(name: str, config: NamedRewardConfig) -> None:
    """Find what is wrong with a judge without asking it.

    Raises:
        ConfigError: a template is none, or does not show the judge what it judges, or the nonce where its
            verdict is read by it; or the verdict's function cannot be loaded.
    """
    judge = config.judge
    assert judge is not None
    JudgePrompt(name, judge)
    Verdict(name, judge.verdict)
    parsed = [ImmutableSandboxedEnvironment().parse(text) for text in (judge.template, judge.system)]
    shown = {each for tree in parsed for each in find_undeclared_variables(tree)}
    where = f"reward.rewards.{name}.judge.template"
    if "completion" not in shown:
        raise ConfigError(
            f"{where} does not show the judge the completion: put {{{{ completion }}}} where it should be"
        )
    if NONCE in judge.verdict.regex + judge.verdict.json_field and "nonce" not in shown:
        raise ConfigError(
            f"{where} does not show the nonce by which the verdict is read: ask in it for a line such as "
            f"'Score {{{{ nonce }}}}: N', or take {NONCE} out of the verdict"
        )


def judge_reading(name: str, config: NamedRewardConfig, sample: RewardSample, _: ServersConfig) -> str:
    """What the judge reads about a sample. Raises AttemptError: the template cannot be filled in."""
    assert config.judge is not None
    messages = JudgePrompt(name, config.judge).messages(sample)
    return lines_of(messages) if config.judge.api == "chat" else str(messages[-1]["content"])
