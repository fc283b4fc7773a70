"""What a rollout worker counts of each sample."""

from collections.abc import Sequence

from common import metrics
from common.gathered import Gathered
from common.messages import Lane, Trajectory

Counted = tuple[int, int, float]
"""Tokens of the prompt and of the completion, and the seconds it took."""


class SampleCounts:
    """The metrics of one lane."""

    def __init__(self, lane: Lane) -> None:
        self._published = metrics.TRAJECTORIES_PUBLISHED.labels(lane)
        self._prompt_tokens = metrics.PROMPT_TOKENS.labels(lane)
        self._completion_tokens = metrics.COMPLETION_TOKENS.labels(lane)
        self._seconds = metrics.GENERATION_SECONDS.labels(lane)
        self._gathered: Gathered[Counted] = Gathered(self._book)

    def observe(self, sample: Trajectory) -> None:
        """One sample was published."""
        seconds = sample.finished_at - sample.started_at
        self._gathered.add((len(sample.prompt_ids), len(sample.completion_ids), seconds))

    def _book(self, samples: Sequence[Counted]) -> None:
        prompts, completions, seconds = zip(*samples, strict=True)
        self._published.inc(len(samples))
        self._prompt_tokens.inc(sum(prompts))
        self._completion_tokens.inc(sum(completions))
        self._seconds.observe_many(seconds)
