"""One completion as rewards see it. Imported by scoring processes too, so it stays light."""

import copy
from dataclasses import dataclass, field
from typing import Any, TypedDict

from tidemill.common.run.dataset import PROMPT
from tidemill.common.wire.messages import Lane, Trajectory, TrajectoryKey
from tidemill.common.wire.segments import Segment

ChatMessages = list[dict[str, Any]]

IDS_READING = "the token ids that the policy read and wrote"
"""What `check` shows of a request that has no text."""


class SessionFacts(TypedDict):
    """What a session adds to its sample, as plain values."""

    environment: str
    messages: ChatMessages
    """What was said after the prompt, by the model and the environment."""
    turn_rewards: list[float | None]
    """What the environment gave for each turn of the model; None where it gave nothing."""
    reward: float | None
    metrics: dict[str, float]
    end: str


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What there is to score.

    `prompt_text` is what the model read, the policy's chat template included, and never goes into another
    model's template: `prompt` and `chat` are the dataset row's own. Token ids are those of the policy's
    tokenizer. Text and ids of a session whose history was rewritten are those of its last segment; `session`
    has all that was said.
    """

    key: TrajectoryKey
    is_evaluation: bool
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt_text: str = ""
    prompt_ids: Any = ()
    completion_ids: Any = ()
    group_size: int = 1
    step: int = 0
    own_text: str = ""
    """The row's own text, where it is text and not all of `prompt_text`."""
    session: SessionFacts | None = None
    """None for a single turn."""
    loss_mask: Any = None
    """Which completion tokens are the model's; None means all."""
    source: str = ""
    """The source of `data.train`, or the evaluation set, where the run has several sources."""
    segments: tuple[Segment, ...] = ()
    """All rows to train on, for teachers; functions in other processes do not get them."""
    tokens_digest: str = ""
    """The trajectory's, for the score."""

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, lane: Lane) -> "RewardSample":
        """The text of a trajectory with what its prompt brought along."""
        last = trajectory.segments[-1]
        return cls(
            trajectory.key,
            lane is Lane.EVAL,
            trajectory.data_source,
            trajectory.text,
            trajectory.ground_truth,
            trajectory.extra,
            trajectory.prompt_text,
            last.prompt_ids,
            last.completion_ids,
            trajectory.group_size,
            trajectory.step,
            trajectory.own_text,
            _facts(trajectory),
            last.loss_mask,
            trajectory.source,
            trajectory.segments,
            trajectory.tokens_digest,
        )

    @property
    def lane(self) -> Lane:
        """Whether its score is for training or for evaluation."""
        return Lane.EVAL if self.is_evaluation else Lane.TRAIN

    @property
    def messages(self) -> ChatMessages | None:
        """The prompt as the dataset's chat messages, where it is a chat."""
        prompt = self.extra_info.get(PROMPT)
        return prompt if isinstance(prompt, list) else None

    @property
    def chat(self) -> ChatMessages:
        """The prompt as chat messages; a row that is text is one message of the user's."""
        return self.messages or [{"role": "user", "content": self.prompt}]

    @property
    def prompt(self) -> str:
        """The prompt as the row has it: its text, a chat's only message, or all of them with their roles."""
        if self.messages is None:
            return self.own_text or self.prompt_text
        if len(self.messages) == 1:
            return str(self.messages[0].get("content", ""))
        return lines_of(self.messages, "\n\n")

    @property
    def said(self) -> ChatMessages:
        """What was said after the prompt: a session's messages, or the completion as the assistant's one."""
        if self.session is not None and self.session["messages"]:
            return self.session["messages"]
        return [{"role": "assistant", "content": self.solution_str}]

    @property
    def conversation(self) -> ChatMessages:
        """The chat with all that was said after it; an assistant's message at its end is continued."""
        (*before, last), (first, *after) = self.chat, self.said
        if last.get("role") == first.get("role") == "assistant":
            content = f"{last.get('content') or ''}{first.get('content') or ''}"
            return [*before, {**last, **first, "content": content}, *after]
        return [*before, last, first, *after]

    def fields(self) -> dict[str, Any]:
        """The arguments of `compute_score`, by name; the dicts are the caller's own.

        `extra_info` says under `is_evaluation` whether the score is for training or for evaluation. Of a
        session it also has `num_turns` (of the model), `messages` (the whole conversation), `turn_scores`
        (what the environment gave for each turn), `environment_reward` and `environment_metrics`.
        """
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": {**self.extra_info, **self._of_session(), "is_evaluation": self.is_evaluation},
        }

    def _of_session(self) -> dict[str, Any]:
        if self.session is None:
            return {}
        return {
            "num_turns": len(self.session["turn_rewards"]),
            "messages": copy.deepcopy(self.conversation),
            "turn_scores": list(self.session["turn_rewards"]),
            "environment_reward": self.session["reward"],
            "environment_metrics": dict(self.session["metrics"]),
        }


def lines_of(messages: ChatMessages, between: str = "\n") -> str:
    return between.join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _facts(trajectory: Trajectory) -> SessionFacts | None:
    session = trajectory.session
    if session is None:
        return None
    return SessionFacts(
        environment=session.environment,
        messages=list(session.messages),
        turn_rewards=[turn.reward for segment in trajectory.segments for turn in segment.turns],
        reward=session.reward,
        metrics=dict(session.metrics),
        end=session.end,
    )
