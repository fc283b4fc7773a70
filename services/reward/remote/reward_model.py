"""The reward of a reward model: one score of its server becomes one value, or an error, never a guess.

Both servers, vLLM's and this project's, are asked in vLLM's pooling API for raw scores (`use_activation:
false`); what is done to them stands in the config, and depends on nothing but the score itself.
"""

import math
from typing import Any

import httpx

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import RewardModelConfig
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.remote.calls import RemoteCalls, post
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import (
    CHARS_PER_TOKEN,
    FaultKind,
    RemoteFault,
    check_key,
)
from tidemill.services.reward.remote.limiter import Permit
from tidemill.services.reward.remote.router import Replica
from tidemill.services.reward.sample import RewardSample

URGENT, NORMAL = -1, 0
MAX_KEPT_TOKENS = 100_000


class ModelReward:
    """Scores samples by a reward model behind a router."""

    slots: int | None = None

    def __init__(self, config: RewardModelConfig, calls: RemoteCalls, http: httpx.AsyncClient) -> None:
        self._config, self._calls, self._http = config, calls, http

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Ask the model once. Raises AttemptError: no replica gave a score, or there is nothing to score."""
        body = make_body(sample, self._config)
        scores = await self._calls.ask(
            lambda replica, permit: self._send(replica, permit, body), sample.lane, _estimate(body)
        )
        raw = reduce_scores(scores, sample, self._config)
        if not math.isfinite(raw):
            raise AttemptError(f"the reward model's score is {raw}", kind=FaultKind.GARBAGE)
        detail = {}
        if self._config.head == "token" and self._config.keep_token_rewards:
            detail["token_rewards"] = [_label(row, self._config.label) for row in scores[:MAX_KEPT_TOKENS]]
        return RewardOutcome(normalise(raw, self._config), {"raw": raw}, detail)

    async def close(self) -> None:
        """Stop watching replicas."""
        await self._calls.close()

    async def _send(self, replica: Replica, permit: Permit, body: dict[str, Any]) -> list[Any]:
        path = "/pooling" if self._config.head == "token" else "/classify"
        answer = await post(self._http, replica, replica.origin + path, body, self._config.api_key_env)
        try:
            found = answer.json()
            (item,) = found["data"]
            scores = item["data"] if self._config.head == "token" else item["probs"]
            num_tokens = int(found["usage"]["prompt_tokens"])
            _check(scores, self._config)
        except (ValueError, TypeError, LookupError) as error:
            shown = answer.text[:200]
            raise RemoteFault(
                FaultKind.GARBAGE, f"{replica.origin} answered what is no score ({error}): {shown}"
            ) from error
        permit.used_tokens = num_tokens
        self._calls.count_tokens(num_tokens, 0)
        return list(scores)


def make_model_reward(name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> ModelReward:
    """The reward of the model called `name`.

    Raises:
        ConfigError: no server of it is known, or its key is not there.
    """
    assert config.model is not None
    check_model_reward(name, config.model)
    calls = dependencies.make_calls(name, config.model, config.timeout_s)
    return ModelReward(config.model, calls, dependencies.http)


def check_model_reward(name: str, config: RewardModelConfig) -> None:
    """Find what is wrong with a reward model without asking it; raises ConfigError."""
    check_key(name, config.api_key_env, "model.api_key_env")


def make_body(sample: RewardSample, config: RewardModelConfig) -> dict[str, Any]:
    """The request for one sample."""
    body: dict[str, Any] = {"use_activation": False}
    if config.input == "ids":
        body["input"] = [int(token) for ids in (sample.prompt_ids, sample.completion_ids) for token in ids]
    elif config.input == "text":
        body["input"] = sample.prompt_text + sample.solution_str
    else:
        body["messages"] = sample.conversation
    if config.served_name:
        body["model"] = config.served_name
    if config.head == "token":
        body["task"] = "token_classify"
    if config.max_tokens:
        body |= {"truncate_prompt_tokens": config.max_tokens, "truncation_side": "left"}
    if config.server == "transformers":  # vLLM knows priorities only when started so
        body["priority"] = URGENT if sample.is_evaluation else NORMAL
    return body


def reduce_scores(scores: list[Any], sample: RewardSample, config: RewardModelConfig) -> float:
    """One number from the scores of labels, or of tokens and labels.

    Raises:
        AttemptError: the completion has no token to take a score from.
    """
    if config.head == "sequence":
        return _label(scores, config.label)
    tokens = [_label(row, config.label) for row in scores]
    if config.token_reward == "last":
        return tokens[-1]
    if config.token_reward == "all_mean":
        return math.fsum(tokens) / len(tokens)
    # Truncation takes from the beginning, so the completion is at the end either way.
    num_completion = len(sample.completion_ids)
    own = tokens[-num_completion:] if num_completion else []
    if sample.loss_mask is not None:  # the environment's tokens are not what is scored
        own = [score for score, is_own in zip(own, sample.loss_mask[-len(own) :], strict=True) if is_own]
    if not own:
        raise AttemptError("the completion is empty: it has no token to score", is_final=True)
    if config.token_reward == "min":
        return min(own)
    total = math.fsum(own)
    return total if config.token_reward == "sum" else total / len(own)


def normalise(raw: float, config: RewardModelConfig) -> float:
    """The value of a raw score."""
    value = raw
    if config.normalise == "sigmoid":
        value = 1.0 / (1.0 + math.exp(-raw)) if raw > -500 else 0.0
    elif config.normalise == "standardise":
        value = (raw - config.mean) / config.std
    if config.clip is not None:
        value = min(max(value, config.clip[0]), config.clip[1])
    return value


def _check(scores: Any, config: RewardModelConfig) -> None:
    """Numbers where numbers have to be, and as many labels as the config counts on."""
    if not isinstance(scores, list) or not scores:
        raise ValueError("it holds no scores")
    for row in scores if config.head == "token" else [scores]:
        labels = row if isinstance(row, list) else [row]
        if len(labels) <= config.label:
            raise ValueError(f"it has {len(labels)} labels, and label {config.label} is wanted")
        float(labels[config.label])


def _label(row: Any, label: int) -> float:
    return float(row[label] if isinstance(row, list) else row)


def _estimate(body: dict[str, Any]) -> int:
    given = body.get("input")
    if isinstance(given, list):
        return len(given)
    if isinstance(given, str):
        return len(given) // CHARS_PER_TOKEN
    return sum(len(str(message.get("content", ""))) for message in body["messages"]) // CHARS_PER_TOKEN
