"""One completion as reward functions see it. Imported by scoring processes too, so it stays light."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.messages import Lane, Trajectory, TrajectoryKey


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is to score."""

    key: "TrajectoryKey"
    is_evaluation: bool
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_trajectory(cls, trajectory: "Trajectory", lane: "Lane") -> "Sample":
        """The text of a trajectory with what its prompt brought along."""
        return cls(
            trajectory.key,
            lane.value == "eval",
            trajectory.data_source,
            trajectory.text,
            trajectory.ground_truth,
            trajectory.extra,
        )

    def fields(self) -> dict[str, Any]:
        """The arguments of `compute_score`, by name; the dict is the caller's own."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": dict(self.extra_info),
        }
