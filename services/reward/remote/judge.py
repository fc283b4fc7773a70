"""A reward that asks a language model for its verdict.

One attempt: fill in the template, ask within the run's limits, read a number from the words. Words without a
number are a failed attempt, and what the judge quotes of the completion is no verdict of the judge's. The
words are kept in the score's detail, and tokens are counted whatever came of them, because they are paid for.
"""

import secrets
import time
from typing import TYPE_CHECKING

from common.config import NamedRewardConfig
from common.config.judge import JudgeConfig
from common.messages import Lane
from services.reward.outcome import MAX_DETAIL_CHARS, Outcome
from services.reward.remote.calls import RemoteCalls, make_calls
from services.reward.remote.faults import RemoteFault
from services.reward.remote.limiter import Permit
from services.reward.remote.local_replicas import check_local_replicas
from services.reward.remote.openai_requests import Judgement, OpenAIRequests, check_openai
from services.reward.remote.replica import Replica
from services.reward.remote.template import JudgePrompt, Message
from services.reward.remote.verdict import make_verdict
from services.reward.sample import Sample

if TYPE_CHECKING:
    from services.reward.services import RewardServices

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
