"""What one step asks of each stage: measured on a run, or assumed. The numbers that sizing computes with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.activity import WAIT
from common.config import RunConfig
from common.weight_files import WEIGHTS_FOLDER, folder_versions, version_name
from services.console.evidence import RATE_STEPS, Evidence, state_of

CHECKPOINTS_FOLDER = "checkpoints"
WHOLE = 0.9
"""Reward workers with more than this of their capacity in use show what they can do at most."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Means over the last steps of a run, or what somebody expects of it."""

    source: str
    """Where the numbers come from, in words."""
    completions: float
    """Generated and scored for one step, those of replaced groups included."""
    completion_tokens: float
    """Length of one completion."""
    rollout_tokens_per_s: float
    """Of one rollout worker while it generates."""
    generation_s: float
    """From a request to its completion, in the engine."""
    score_s: float
    score_p95_s: float
    scores_per_s: float
    """Of one reward worker, at most."""
    trainer_s: float
    """Work of the trainer: preparing, training, updating, writing weights and checkpoints."""
    redis_s: float = 0.0
    """What the trainer waits for Redis in a step."""
    record_bytes: float = 0.0
    """Of a trajectory and its score in Redis; 0 where it is not known."""
    trained: float = 0.0
    """Of the completions, those that a step trains on; 0 means all."""
    weights_bytes: int = 0
    checkpoint_bytes: int = 0
    step_s: float | None = None
    """As measured; None where nothing was."""

    def scaled_to(self, config: RunConfig) -> "StageTimes":
        """The times of a step of another size: work grows with the number of completions."""
        wanted = config.trainer.groups_per_step * config.trainer.group_size
        factor = wanted / (self.trained or self.completions)
        return replace(
            self,
            completions=self.completions * factor,
            trained=wanted,
            trainer_s=self.trainer_s * factor,
        )


def measured_times(
    steps: Sequence[Mapping[str, float]], evidence: Evidence, run_dir: Path, source: str
) -> StageTimes | None:
    """From the metrics of a run's steps, without those of the warm-up; None where they do not tell."""
    known = [numbers for numbers in steps if "stages/score_s" in numbers][-RATE_STEPS:]
    if not known or not evidence.step_s:
        return None
    completions = _mean(known, "stages/scores")
    tokens = _mean(known, "completions/mean_length")
    replaced = 1.0 / max(1e-3, 1.0 - _mean(known, "groups_dropped_ratio"))
    work_s, redis_s = _trainer_seconds(known)
    step_s = evidence.step_s
    generating_s = (evidence.busy("rollout") or 0.0) * evidence.num_workers.get("rollout", 0) * step_s
    return StageTimes(
        source=source,
        completions=completions * replaced,
        trained=completions,
        completion_tokens=tokens,
        rollout_tokens_per_s=completions * replaced * tokens / generating_s if generating_s else 0.0,
        generation_s=min(_mean(known, "stages/generation_s"), generating_s or step_s),
        score_s=_mean(known, "stages/score_s"),
        score_p95_s=_mean(known, "stages/score_p95_s"),
        scores_per_s=_scores_per_s(known, evidence, completions * replaced),
        trainer_s=work_s,
        redis_s=redis_s,
        record_bytes=_mean(known, "stages/record_bytes"),
        weights_bytes=_newest_bytes(run_dir / WEIGHTS_FOLDER),
        checkpoint_bytes=_newest_bytes(run_dir / CHECKPOINTS_FOLDER),
        step_s=step_s,
    )


def _scores_per_s(steps: Sequence[Mapping[str, float]], evidence: Evidence, scores: float) -> float:
    """Of one worker: as many as it can score at once over the time of one score.

    A busy worker shows it: then it is what it did. Time within a worker's own queue is part of a score's
    time, so that the quotient would be too low for it.
    """
    workers = max(1, evidence.num_workers.get("reward", 0))
    score_s, step_s = _mean(steps, "stages/score_s"), evidence.step_s or 0.0
    did = scores / (workers * step_s) if step_s else 0.0
    use = evidence.score_use
    if use is None:  # nobody says how many a worker can score at once: while it scored, it did its best
        busy_s = min(_mean(steps, "stages/reward_busy_s"), workers * step_s)
        return scores / busy_s if busy_s else 0.0
    return did if use > WHOLE or not score_s else did / use


def _trainer_seconds(steps: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Seconds of a step that the trainer works, and that it waits for Redis."""
    names = {name for numbers in steps for name in numbers}
    times = {name for name in names if name.startswith("time/") and name.endswith("_s")}
    work = sum(_mean(steps, name) for name in times if not state_of(name).startswith(WAIT))
    return work, _mean(steps, "time/wait_redis_s")


def _newest_bytes(folder: Path) -> int:
    """Size of the newest version in a folder; 0 where there is none."""
    versions = folder_versions(folder)
    if not versions:
        return 0
    files = (folder / version_name(versions[-1])).rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(numbers.get(name, 0.0) for numbers in steps) / len(steps)
