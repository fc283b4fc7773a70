"""One completion as rewards see it. Imported by scoring processes too, so it stays light."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tidemill.common.data.dataset import PROMPT
from tidemill.common.data.image_columns import MARK, marked_text, with_parts
from tidemill.common.wire.messages import Lane, Trajectory, TrajectoryKey
from tidemill.common.wire.segments import Segment

ChatMessages = list[dict[str, Any]]

IDS_READING = "the token ids that the policy read and wrote"
"""Shown by `check` for a request that has token ids and no text."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """A trajectory to score.

    Its `prompt_text` is what the model read, the policy's chat template included, and never goes into another
    model's template: `prompt` and `chat` are the dataset row's own. Token ids are those of the policy's
    tokenizer. Text and ids of a session whose history was rewritten are those of its last segment; its
    `session` has all that was said.

    Example: the trajectory of "2+2=" with the completion "4" in `Lane.TRAIN`: `prompt` "2+2=", `said`
    [{"role": "assistant", "content": "4"}].
    """

    trajectory: Trajectory
    lane: Lane = Lane.TRAIN
    """Whether its score is for training or for evaluation."""
    began_at: float = field(default=0.0, compare=False)
    """When its first attempt began, on the monotonic clock; 0 where none has."""
    pictures: tuple[bytes, ...] = field(default=(), compare=False, repr=False)
    """PNG files of the pictures of its prompt, in their order, once they are read for a reward that asks for
    them (`pictures.py`)."""

    @property
    def key(self) -> TrajectoryKey:
        return self.trajectory.key

    @property
    def is_evaluation(self) -> bool:
        return self.lane is Lane.EVAL

    @property
    def last(self) -> Segment:
        """The segment whose ids are scored."""
        return self.trajectory.segments[-1]

    @property
    def turn_rewards(self) -> list[float | None]:
        """The environment's reward for each turn of the model; None where it gave none."""
        return [turn.reward for segment in self.trajectory.segments for turn in segment.turns]

    @property
    def messages(self) -> ChatMessages | None:
        """The prompt as the dataset's chat messages; None if it is text."""
        prompt = self.trajectory.extra.get(PROMPT)
        return prompt if isinstance(prompt, list) else None

    @property
    def chat(self) -> ChatMessages:
        """The prompt as chat messages; a row that is text is one message of the user's."""
        return self.messages or [{"role": "user", "content": self.prompt}]

    @property
    def prompt(self) -> str:
        """The prompt as the row has it: its text, a chat's only message, or all of them with their roles. In
        place of a picture stands `<image>`."""
        if self.messages is None:
            return self.trajectory.own_text or self.trajectory.prompt_text
        if len(self.messages) == 1:
            return str(_text_of(self.messages[0]))
        return lines_of(self.messages, "\n\n")

    @property
    def said(self) -> ChatMessages:
        """The messages after the prompt: those of a session, or the completion as one assistant message."""
        session = self.trajectory.session
        if session is not None and session.messages:
            return list(session.messages)
        answer: dict[str, Any] = {"role": "assistant", "content": self.trajectory.text}
        if self.trajectory.thought:
            answer["reasoning_content"] = self.trajectory.thought
        return [answer]

    @property
    def of_thought(self) -> dict[str, str]:
        """The model's thought, by its name for rewards; empty where the run does not part it from the
        answer."""
        thought = self.trajectory.thought
        return {} if thought is None else {"thought": thought}

    @property
    def conversation(self) -> ChatMessages:
        """The chat with all that was said after it; an assistant's message at its end is continued."""
        *before, last = self.chat
        first, *after = self.said
        if last.get("role") == first.get("role") == "assistant":
            content = f"{_text_of(last) or ''}{_text_of(first) or ''}"
            return [*before, {**last, **first, "content": content}, *after]
        return [*before, last, first, *after]

    def with_marks(self, marks: Sequence[str]) -> "RewardSample":
        """The sample with a text in place of each picture of its prompt, which is a chat of texts then.

        Raises:
            BrokenImageError: its chat has more or fewer places than there are marks.
        """
        remaining = iter(marks)
        chat = [
            {**message, "content": marked_text(message["content"], remaining)}
            for message in with_parts(self.chat, len(marks))
        ]
        extra = self.trajectory.extra | {PROMPT: chat}
        return replace(self, trajectory=self.trajectory.model_copy(update={"extra": extra}))

    def to_wire(self) -> dict[str, Any]:
        """What a function may be given of it, for `from_wire` in a scoring process. The worker has validated
        the trajectory; nothing of it is validated again on the way.

        Example: `{"ticket": 7, "index": 1, "step": 2, "text": "#### 4", "ids": b"..."}`; other fields only
        where they are not empty.
        """
        trajectory = self.trajectory
        tree: dict[str, Any] = {
            "ticket": trajectory.ticket,
            "index": trajectory.index,
            "step": trajectory.step,
            "text": trajectory.text,
        }
        for name, default in _OPTIONAL_FIELDS.items():
            value = getattr(trajectory, name)
            if value is not None and value != default:
                tree[name] = value
        session = trajectory.session
        if session is None:
            ids = trajectory.completion_ids
        else:
            ids = self.last.completion_ids
            tree["session"] = {
                "messages": session.messages,
                "reward": session.reward,
                "metrics": session.metrics,
                "turn_rewards": self.turn_rewards,
            }
        tree["ids"] = np.ascontiguousarray(ids).data
        if self.pictures:
            tree["pictures"] = list(self.pictures)
        return tree

    @classmethod
    def from_wire(cls, tree: dict[str, Any], lane: Lane) -> "RewardSample":
        """The sample in a scoring process. Its `trajectory` is a `ReceivedTrajectory`."""
        session = tree.get("session")
        if session is not None:
            tree["session"] = ReceivedSession(**session)
        pictures = tuple(tree.pop("pictures", ()))
        received: Any = ReceivedTrajectory(**tree)
        return cls(received, lane, pictures=pictures)

    def fields(self) -> dict[str, Any]:
        """The arguments of `compute_score`, by name; `extra_info` is a new dict.

        Its `is_evaluation` says whether the score is for evaluation or training. Where the run parts thoughts
        from answers (`model.special_tokens`), `thought` has what the model thought, maybe nothing, and
        `solution_str` the answer. For a session it also has
        `num_turns` (of the model), `messages` (the whole conversation), `turn_scores` (the environment's
        reward for each turn), `environment_reward` and `environment_metrics`.
        """
        trajectory = self.trajectory
        of_session = dict[str, Any]()
        session = trajectory.session
        if session is not None:
            of_session = {
                "num_turns": len(self.turn_rewards),
                # A user's function may change what it is given, and other rewards read the same sample.
                "messages": copy.deepcopy(self.conversation),
                "turn_scores": self.turn_rewards,
                "environment_reward": session.reward,
                "environment_metrics": dict(session.metrics),
            }
        of_sample = {**of_session, **self.of_thought, "is_evaluation": self.is_evaluation}
        return {
            "data_source": trajectory.data_source,
            "solution_str": trajectory.text,
            "ground_truth": trajectory.ground_truth,
            "extra_info": {**trajectory.extra, **of_sample},
        }


_OPTIONAL_FIELDS: dict[str, Any] = {
    "data_source": "",
    "ground_truth": None,
    "extra": {},
    "prompt_text": "",
    "own_text": "",
    "thought": None,
}
"""Fields that are left out at their default. No thought and an empty one are different."""


@dataclass(slots=True)
class ReceivedTurn:
    reward: float | None


@dataclass(slots=True)
class ReceivedSegment:
    completion_ids: Sequence[int]
    """[T] int32."""
    turns: list[ReceivedTurn]


@dataclass(slots=True)
class ReceivedSession:
    """What rewards see of a `Session`."""

    messages: list[dict[str, Any]]
    reward: float | None
    metrics: dict[str, float]
    turn_rewards: list[float | None]
    """Of the turns of all segments."""


@dataclass(slots=True)
class ReceivedTrajectory:
    """The fields of a `Trajectory` that functions are given, under the same names.

    Example: `ticket` 7, `index` 1, `step` 2, `text` "#### 4", `ids` the 4 bytes of one token; no `session`.
    """

    ticket: int
    index: int
    step: int
    text: str
    ids: bytes
    """[T] int32: the ids of the last segment's completion."""
    session: ReceivedSession | None = None
    data_source: str = ""
    ground_truth: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    prompt_text: str = ""
    own_text: str = ""
    thought: str | None = None

    @property
    def key(self) -> TrajectoryKey:
        return self.ticket, self.index

    @property
    def segments(self) -> tuple[ReceivedSegment]:
        """The last segment, with the turns of all. Made when it is asked for: most functions read text."""
        turn_rewards = self.session.turn_rewards if self.session is not None else []
        turns = [ReceivedTurn(reward) for reward in turn_rewards]
        return (ReceivedSegment(memoryview(self.ids).cast("i"), turns),)


def lines_of(messages: ChatMessages, between: str = "\n") -> str:
    return between.join(f"{message.get('role')}: {_text_of(message)}" for message in messages)


def _text_of(message: dict[str, Any]) -> Any:
    return marked_text(message.get("content"), itertools.repeat(MARK))
