"""What rewards said of one sample of a group, kept in Redis until the group is whole."""

from dataclasses import asdict
from typing import Any, ClassVar

from pydantic import Field

from common.arrays import Int32Array
from common.messages import Message
from services.reward.hybrid import Parts
from services.reward.part import Part
from services.reward.sample import Sample


class GroupResult(Message):
    """The parts of one sample with what group functions see of it. The prompt is the same for the group."""

    kind: ClassVar[str] = "group result"
    index: int = Field(ge=0)
    text: str
    completion_ids: Int32Array
    parts: dict[str, dict[str, Any]]
    worker: str = ""
    latency_s: float = 0.0

    @classmethod
    def of(cls, sample: Sample, parts: Parts, worker: str, latency_s: float) -> "GroupResult":
        """The result of a sample."""
        return cls(
            index=sample.key[1],
            text=sample.solution_str,
            completion_ids=sample.completion_ids,
            parts={name: asdict(part) for name, part in parts.items()},
            worker=worker,
            latency_s=latency_s,
        )

    def part(self, name: str) -> Part:
        """What one reward said."""
        return Part(**self.parts[name])
