"""What a function is asked: to score samples, or to post-process the scores of a group.

Imported by scoring processes too, so it stays light. `to_wire` and `from_wire` are what crosses the
socket, in frames (`common/process/children.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from tidemill.common.wire.arrays import pack_bits, unpack_bits
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.sample import RewardSample

FAILURE_FIELDS = ("is_timeout", "is_final", "kind", "retry_after_s")
UNSENT_FIELDS = ("segments", "tokens_digest")
SAMPLE_FIELDS = tuple(field.name for field in fields(RewardSample) if field.name not in UNSENT_FIELDS)


@dataclass(frozen=True, slots=True)
class Request:
    """One call. With `scores`, the samples of a group are post-processed; without, they are scored."""

    samples: list[RewardSample]
    given: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that are known only while the worker runs, such as a router's address."""
    scores: list[float | None] | None = None
    notes: list[dict[str, Any]] | None = None
    """Beside each score: its status, error and components."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "samples": [_wired(sample) for sample in self.samples],
            "given": dict(self.given),
            "scores": self.scores,
            "notes": self.notes,
        }

    @classmethod
    def from_wire(cls, tree: dict[str, Any]) -> "Request":
        """The request that `to_wire` wrote."""
        return cls(**tree | {"samples": [_unwired(sample) for sample in tree["samples"]]})


def outcomes_to_wire(outcomes: list[RewardOutcome]) -> dict[str, Any]:
    """What a call came to, as plain values."""
    return {"outcomes": [(outcome.value, outcome.components, outcome.detail) for outcome in outcomes]}


def failure_to_wire(error: AttemptError) -> dict[str, Any]:
    """The failure of a call, as plain values."""
    return {"error": str(error)} | {name: getattr(error, name) for name in FAILURE_FIELDS}


def outcomes_of(answer: dict[str, Any]) -> list[RewardOutcome]:
    """What the two functions above wrote. Raises AttemptError: the failure that was written."""
    if "error" in answer:
        further = {name: answer[name] for name in FAILURE_FIELDS if name in answer}
        raise AttemptError(answer["error"], **further)
    return [RewardOutcome(*parts) for parts in answer["outcomes"]]


class Callee(Protocol):
    """A function of a user or a built-in one, with all that is needed to call it."""

    @property
    def name(self) -> str:
        """What the config calls it."""

    @property
    def is_async(self) -> bool:
        """Whether it is awaited."""

    @property
    def is_cheap(self) -> bool:
        """Whether it takes microseconds, so that it may run on the event loop."""

    def spec(self) -> dict[str, Any]:
        """What another process needs to load the same."""

    def call(self, request: Request) -> list[RewardOutcome]:
        """Call a plain function: one outcome for each sample. Raises AttemptError."""

    async def call_async(self, request: Request) -> list[RewardOutcome]:
        """Call an async function."""


def _wired(sample: RewardSample) -> dict[str, Any]:
    tree = {name: getattr(sample, name) for name in SAMPLE_FIELDS}  # `asdict` would copy every value
    for name in ("prompt_ids", "completion_ids"):
        tree[name] = np.asarray(tree[name], dtype="<i4").tobytes()
    if sample.loss_mask is not None:
        tree["loss_mask"] = pack_bits(sample.loss_mask)
    return tree


def _unwired(tree: dict[str, Any]) -> RewardSample:
    for name in ("prompt_ids", "completion_ids"):
        tree[name] = np.frombuffer(tree[name], dtype="<i4")
    if tree["loss_mask"] is not None:
        tree["loss_mask"] = unpack_bits(tree["loss_mask"])
    return RewardSample(**tree | {"key": tuple(tree["key"])})
