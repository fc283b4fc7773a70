"""The reward of a reward model: the scores of its server become one value, or an error, never a guess.

Both servers, vLLM's and this project's, are asked in vLLM's pooling API for raw scores (`use_activation:
false`); the config says how a value is made of them, which depends on nothing but the scores.
"""

import math
from pathlib import Path
from typing import Any

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import RewardModelConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.run.chat_template import ChatTemplate, RenderError
from tidemill.services.reward.outcome import AttemptError, Reward, RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import CHARS_PER_TOKEN, FaultKind
from tidemill.services.reward.remote.picture_parts import mark_pictures, put_pictures
from tidemill.services.reward.remote.serving import template_file
from tidemill.services.reward.sample import IDS_READING, RewardSample, lines_of

MAX_KEPT_TOKENS = 100_000


class ModelReward(Reward):
    def __init__(self, _: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> None:
        assert config.model is not None
        self._config = config.model
        self._timeout_s = config.timeout_s
        self._servers = dependencies.servers(config.servers)
        self._pictures = dependencies.pictures

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Ask the model once. Raises AttemptError: no replica gave a score, or there is nothing to score."""
        body = make_body(sample, self._config)
        num_tokens = _estimate(body)
        if self._pictures is not None and self._config.input == "chat":
            marked, marks = mark_pictures(sample)
            messages = marked.conversation
            body["messages"], num_picture_tokens = await put_pictures(messages, marks, sample, self._pictures)
            num_tokens += num_picture_tokens
        scores = await self._servers.ask_json(
            "/pooling" if self._config.head == "token" else "/classify",
            body,
            lambda answer: read_scores(answer, self._config),
            lane=sample.lane,
            tokens=num_tokens,
            timeout_s=self._timeout_s,
        )
        raw = reduce_scores(scores, sample, self._config)
        if not math.isfinite(raw):
            raise AttemptError(f"the reward model's score is {raw}", kind=FaultKind.GARBAGE)
        detail = {}
        if self._config.head == "token" and self._config.keep_token_rewards:
            detail["token_rewards"] = [_label(row, self._config.label) for row in scores[:MAX_KEPT_TOKENS]]
        return RewardOutcome(normalise(raw, self._config), {"raw": raw}, detail)


def model_reading(_: str, config: NamedRewardConfig, sample: RewardSample, servers: ServersConfig) -> str:
    """What the model reads about a sample; a chat in its own template, where that is on this machine."""
    assert config.model is not None
    if config.model.input == "ids":
        return IDS_READING
    if config.model.input == "text":
        return sample.trajectory.prompt_text + sample.trajectory.text
    messages = sample.conversation
    local = servers.local
    if local is not None and not local.command and Path(servers.model).is_dir():
        template = ChatTemplate.of(Path(servers.model), template_file(local))
        try:
            if template is not None:
                return template.render(messages, add_generation_prompt=False)
        except RenderError as error:
            return f"{error}: {lines_of(messages)}"
    return lines_of(messages)


def make_body(sample: RewardSample, config: RewardModelConfig) -> dict[str, Any]:
    # Raw scores: a server's own sigmoid or softmax would come before `normalise`.
    body: dict[str, Any] = {"use_activation": False}
    if config.input == "ids":
        body["input"] = [
            int(token) for ids in (sample.last.prompt_ids, sample.last.completion_ids) for token in ids
        ]
    elif config.input == "text":
        body["input"] = sample.trajectory.prompt_text + sample.trajectory.text
    else:
        body["messages"] = sample.conversation
    if config.head == "token":
        body["task"] = "token_classify"
    if config.max_tokens:
        body |= {"truncate_prompt_tokens": config.max_tokens, "truncation_side": "left"}
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
    num_completion = len(sample.last.completion_ids)
    completion = tokens[-num_completion:] if num_completion else []
    if sample.last.loss_mask is not None:  # the environment's tokens are not what is scored
        mask = sample.last.loss_mask[-len(completion) :]
        completion = [score for score, is_own in zip(completion, mask, strict=True) if is_own]
    if not completion:
        raise AttemptError("the completion is empty: it has no token to score", is_final=True)
    if config.token_reward == "min":
        return min(completion)
    total = math.fsum(completion)
    return total if config.token_reward == "sum" else total / len(completion)


def normalise(raw: float, config: RewardModelConfig) -> float:
    value = raw
    if config.normalise == "sigmoid":
        # `exp` raises OverflowError above 709.
        value = 1.0 / (1.0 + math.exp(-raw)) if raw > -500 else 0.0
    elif config.normalise == "standardise":
        value = (raw - config.mean) / config.std
    if config.clip is not None:
        value = min(max(value, config.clip[0]), config.clip[1])
    return value


def read_scores(answer: dict[str, Any], config: RewardModelConfig) -> list[Any]:
    """The scores of the one input: of its labels, or of its tokens and labels.

    Raises:
        ValueError: there are none, or fewer labels than the config counts on.
    """
    (item,) = answer["data"]
    scores = item["data" if config.head == "token" else "probs"]
    if not isinstance(scores, list) or not scores:
        raise ValueError("it holds no scores")
    for row in scores if config.head == "token" else [scores]:
        labels = row if isinstance(row, list) else [row]
        if len(labels) <= config.label:
            raise ValueError(f"it has {len(labels)} labels, and label {config.label} is wanted")
        # Converted here, so that a value that is no number fails the replica, and another one is asked.
        float(labels[config.label])
    return scores


def _label(row: Any, label: int) -> float:
    return float(row[label] if isinstance(row, list) else row)


def _estimate(body: dict[str, Any]) -> int:
    text_or_ids = body.get("input")
    if isinstance(text_or_ids, list):
        return len(text_or_ids)
    if isinstance(text_or_ids, str):
        return len(text_or_ids) // CHARS_PER_TOKEN
    return sum(len(str(message.get("content", ""))) for message in body["messages"]) // CHARS_PER_TOKEN
