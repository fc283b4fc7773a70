"""What a rollout worker counts of each sample.

Finding a metric by its labels costs more than counting does, so that is done once.
"""

from common import metrics
from common.messages import Lane, Trajectory


class SampleCounts:
    """The metrics of one lane."""

    def __init__(self, lane: Lane) -> None:
        self._published = metrics.TRAJECTORIES_PUBLISHED.labels(lane)
        self._prompt_tokens = metrics.PROMPT_TOKENS.labels(lane)
        self._completion_tokens = metrics.COMPLETION_TOKENS.labels(lane)
        self._seconds = metrics.GENERATION_SECONDS.labels(lane)

    def observe(self, sample: Trajectory) -> None:
        """One sample was published."""
        self._published.inc()
        self._prompt_tokens.inc(len(sample.prompt_ids))
        self._completion_tokens.inc(sample.num_tokens)
        self._seconds.observe(sample.finished_at - sample.started_at)
