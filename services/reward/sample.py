"""One completion as rewards see it. Imported by scoring processes too, so it stays light."""

from dataclasses import dataclass, field
from typing import Any

from common.run.dataset import PROMPT
from common.wire.messages import Lane, Trajectory, TrajectoryKey

ChatMessages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What there is to score.

    `prompt_text` is what the model read, the policy's chat template included, and never goes into another
    model's template: `prompt` and `chat` are the dataset row's own. Token ids are those of the policy's
    tokenizer.
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

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, lane: Lane) -> "RewardSample":
        """The text of a trajectory with what its prompt brought along."""
        return cls(
            trajectory.key,
            lane is Lane.EVAL,
            trajectory.data_source,
            trajectory.text,
            trajectory.ground_truth,
            trajectory.extra,
            trajectory.prompt_text,
            trajectory.prompt_ids,
            trajectory.completion_ids,
            trajectory.group_size,
            trajectory.step,
            trajectory.own_text,
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
        return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in self.messages)

    @property
    def conversation(self) -> ChatMessages:
        """The chat with the completion: one more message of the assistant's, or the end of the last."""
        *before, last = self.chat
        if last.get("role") == "assistant":
            return [*before, {**last, "content": f"{last.get('content', '')}{self.solution_str}"}]
        return [*self.chat, {"role": "assistant", "content": self.solution_str}]

    def fields(self) -> dict[str, Any]:
        """The arguments of `compute_score`, by name; the dicts are the caller's own.

        `extra_info` says under `is_evaluation` whether the score is for training or for evaluation.
        """
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": {**self.extra_info, "is_evaluation": self.is_evaluation},
        }
