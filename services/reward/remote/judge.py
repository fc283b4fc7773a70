"""A reward that asks a language model for its verdict, in OpenAI's API.

One attempt: fill in the template, ask within the run's limits, read a number from the words. Words without a
number are a failed attempt, and what the judge quotes of the completion is no verdict of the judge's. The
words are kept in the score's detail, and tokens are counted whatever came of them, because they are paid for.
"""

import secrets
import time
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


def read_answer(answer: dict[str, Any], api: str) -> tuple[str, int, bool]:
    """The words of a judge, how many tokens they cost, and whether `max_tokens` ended them.

    Raises:
        ValueError: the answer holds no text, or not in the right place.
    """
    choice = answer["choices"][0]
    words = choice["text"] if api == "completions" else choice["message"].get("content")
    if words is None:
        words = ""  # a model that said nothing, or refused: no verdict, but an answer
    if not isinstance(words, str):
        raise ValueError(f"choices[0] holds {type(words).__name__} in place of text")
    return sendable(words), sum(usage_of(answer)), choice.get("finish_reason") == "length"


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
        # New for each attempt: no completion can know it.
        nonce = secrets.token_hex(NONCE_BYTES)
        messages = self._prompt.messages(sample, nonce)
        started = time.monotonic()
        body: dict[str, Any] = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        is_chat = self.config.api == "chat"
        body |= {"messages": messages} if is_chat else {"prompt": messages[-1]["content"]}
        num_chars = sum(len(one["content"]) for one in messages)
        words, num_tokens, is_cut = await self.servers.ask_json(
            "chat/completions" if is_chat else "completions",
            body | self.config.extra_body,
            lambda answer: read_answer(answer, self.config.api),
            lane=sample.lane,
            tokens=num_chars // CHARS_PER_TOKEN + self.config.max_tokens,
            timeout_s=self._timeout_s,
        )
        given = {"words": words, "nonce": nonce, "is_cut": is_cut}
        try:  # a user's regex or function reads it in a scoring process, within `timeout_s`
            (outcome,) = await self._reading.run(Request([sample], given), self._timeout_s)
        except AttemptError as error:
            fault = unread(words, error)
            self.servers.count(fault)
            raise fault from None
        detail = {
            "judgement": words[:MAX_DETAIL_CHARS],
            "judge_tokens": num_tokens,
            "judge_s": round(time.monotonic() - started, 3),
        }
        return RewardOutcome(outcome.value, outcome.components, {**outcome.detail, **detail})

    async def close(self) -> None:
        """End the processes that read verdicts; the dependencies close the servers."""
        await self._reading.close()


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
