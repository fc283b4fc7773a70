"""How many workers, how much memory and disk a run needs: the formulas of docs/operations/sizing.md.

T is the time of a step that a stage needs with n workers, in seconds:

    T_rollout(n) = completions * tokens / (tokens per second of a worker * n)
    T_reward(n)  = completions / (scores per second of a worker * n)
    T_trainer    = its work + its waiting for Redis
    T_way        = generation + 95th percentile of a score + T_trainer, over 1 + max_staleness

Stages overlap where max_staleness is at least 1, and a step takes as long as the slowest of them. At 0 they
take turns. T_way is the bound that staleness sets: of one ticket's way from admission to commit, no more than
1 + max_staleness steps may be long, however many workers there are.

Where a step's tokens differ from step to step, generation is the later of two stages more often than its mean
tells: E[max(T_rollout, others)] takes the place of the maximum. Where the spread of lengths is known too
(`sigma`), the run is played (`pipeline.py`): stragglers hold up groups, steps, and whoever is bound to them.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.streams.trimming import KEPT_COMMITS
from tidemill.services.console.plan.lengths import mean_of_later
from tidemill.services.console.plan.pipeline import Pipeline, play
from tidemill.services.console.plan.stage_times import StageTimes
from tidemill.services.console.status.bottleneck import Bottleneck

HEAD_ROOM = 0.2
"""Reward workers are counted so that they need no more than 1 less this of the time that there is."""
LEAST_TIME = 0.25
"""The tail of slow scores takes no more than the rest of the time there is."""
BYTES_OF_ADAM = 12
"""A checkpoint holds a parameter and two moments in float32."""
BYTES_OF_A_PARAMETER = 2
BYTES_OF_A_SAMPLE, BYTES_OF_A_COMMIT = 16, 2000
"""What a step takes in the commits stream."""
BYTES_OF_A_TOKEN = 4
BYTES_OF_AN_ENTRY = 500
"""Control fields of a trajectory and its score, and Redis's own share."""
BACKLOG = 1.5
"""Files of the archive that Redis holds before they are written: of trajectories, and of others in part."""
PLAYED_STEPS = 6
SPARE_WEIGHTS = 2
"""Beside `keep_weights`: the version being written, and the best one."""


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers of each kind."""

    rollout: int
    reward: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes with given workers, by stage and altogether, in seconds."""

    rollout_s: float
    reward_s: float
    trainer_s: float
    redis_s: float
    way_s: float
    step_s: float
    overlaps: bool = True
    """Whether stages work at the same time."""

    @property
    def trainer_idle(self) -> float:
        """Share of the step in which the trainer waits for groups."""
        return 1.0 - (self.trainer_s + self.redis_s) / self.step_s if self.step_s else 0.0

    @property
    def rollout_idle(self) -> float:
        """Share of what the engines can do in a step that nobody asks of them."""
        return 1.0 - self.rollout_s / self.step_s if self.step_s else 0.0

    @property
    def slowest(self) -> str:
        """The stage that sets the pace; `staleness` where no stage does."""
        found = {
            "rollout": self.rollout_s,
            "reward": self.reward_s,
            "trainer": self.trainer_s,
            "redis": self.redis_s,
        }
        longest = max(found, key=lambda name: found[name])
        together = self.trainer_s + self.redis_s
        is_bound = self.overlaps and self.way_s > max(found[longest], together)
        return "staleness" if is_bound else longest


def step_time(config: RunConfig, times: StageTimes, workers: Workers) -> StepTime:
    """What a step takes."""
    staleness, tokens = config.trainer.max_staleness, times.completions * times.completion_tokens
    rollout_s = _over(tokens, times.rollout_tokens_per_s * workers.rollout)
    reward_s = _over(times.completions, times.scores_per_s * workers.reward)
    trainer_s = times.trainer_s + times.redis_s
    if staleness == 0:
        way_s = max(rollout_s, times.generation_s, reward_s) + times.score_s + trainer_s
    else:
        way_s = (times.generation_s + times.score_p95_s + trainer_s) / (1 + staleness)
    step_s = mean_of_later(rollout_s, _smoothed(times, staleness), max(reward_s, trainer_s, way_s))
    if times.sigma and rollout_s:
        step_s = max(step_s, play(_pipeline(config, times, workers)).step_s)
    return StepTime(rollout_s, reward_s, times.trainer_s, times.redis_s, way_s, step_s, staleness > 0)


def _smoothed(times: StageTimes, staleness: int) -> float:
    """What is left of the variation between steps where generation may be several steps ahead."""
    return times.variation / math.sqrt(max(1, staleness))


def _pipeline(config: RunConfig, times: StageTimes, workers: Workers) -> Pipeline:
    """The run as it is played."""
    trainer, size = config.trainer, config.trainer.group_size
    groups = max(1, round(times.completions / size))
    fetches = trainer.mini_batches if trainer.start_early else 1
    held = max(
        1, min(config.rollout.max_groups_in_flight * workers.rollout, groups * (2 + trainer.max_staleness))
    )
    return Pipeline(
        groups=groups,
        group_size=size,
        staleness=trainer.max_staleness,
        held=held * size,
        rate=times.rollout_tokens_per_s * workers.rollout / times.completion_tokens,
        alone_s=times.alone_s,
        train_s=times.trainer_s + times.redis_s,
        sigma=times.sigma,
        fetches=fetches if groups % fetches == 0 else 1,
        score_s=times.score_s,
        in_order=trainer.batch_order == "in_order",
        steps=PLAYED_STEPS,
    )


def needed_rollout(config: RunConfig, times: StageTimes) -> int:
    """Rollout workers with which generation takes no longer than a step does for other reasons."""
    alone = step_time(config, times, Workers(1, 1))
    return _ceiling(_over(alone.rollout_s, least_step(config, times)))


def least_step(config: RunConfig, times: StageTimes) -> float:
    """What a step takes however many workers there are: the trainer's time, or the way of a ticket."""
    trainer_s = times.trainer_s + times.redis_s
    if config.trainer.max_staleness == 0:
        return trainer_s  # its way is what the workers shorten
    return max(trainer_s, step_time(config, times, Workers(1, 1)).way_s)


def needed_reward(config: RunConfig, times: StageTimes, rollout: int) -> int:
    """Reward workers with which scoring does not hold up the slowest other stage, with head room."""
    alone_s = step_time(config, times, Workers(1, 1)).reward_s
    return _ceiling(_over(alone_s, time_for_scores(config, times, rollout)))


def time_for_scores(config: RunConfig, times: StageTimes, rollout: int) -> float:
    """Seconds of a step that scoring may take: those of the slowest other stage, less head room and tail."""
    other_s = slowest_other(config, times, rollout)
    tail_s = max(0.0, times.score_p95_s - times.score_s) / (1 + config.trainer.max_staleness)
    return max((1.0 - HEAD_ROOM) * other_s - tail_s, LEAST_TIME * other_s)


def slowest_other(config: RunConfig, times: StageTimes, rollout: int) -> float:
    """What a step takes for the slowest stage that is not reward, and for what no worker can shorten."""
    rollout_s = step_time(config, times, Workers(max(1, rollout), 1)).rollout_s
    return max(least_step(config, times), rollout_s)


def limit_of_scores(config: RunConfig, times: StageTimes) -> tuple[str, float]:
    """What the run's limits allow at most, in scores per second, and whose limit that is; "" for none."""
    found = ("", math.inf)
    for name, reward in config.reward.named.items():
        if not reward.servers:
            continue
        limits = config.servers[reward.servers].limits
        if limits.concurrency and times.score_s:
            found = min(found, (name, limits.concurrency / times.score_s), key=lambda item: item[1])
        if limits.requests_per_minute:
            found = min(found, (name, limits.requests_per_minute / 60), key=lambda item: item[1])
    return found


def _steps_kept(config: RunConfig) -> int:
    """Steps whose entries Redis holds though they are trained: those since the oldest kept checkpoint, where
    the archive does not have them."""
    trainer = config.trainer
    is_trimmed = config.streams.trim and trainer.checkpoint_every > 0
    kept = trainer.checkpoint_every * trainer.keep_checkpoints if is_trimmed else trainer.steps
    kept = 0 if config.streams.trim and config.streams.archive.enabled else kept
    return min(kept, trainer.steps)


def commits_held(config: RunConfig) -> int:
    """Commits that Redis holds at most."""
    return min(config.trainer.steps, _steps_kept(config) + KEPT_COMMITS)


def records_held(config: RunConfig) -> int:
    """Trajectories that Redis holds at most: those under way, and those of the steps that are kept."""
    trainer = config.trainer
    steps = 1 + trainer.max_staleness + _steps_kept(config)
    return steps * trainer.groups_per_step * config.largest_group_size


def record_bytes(config: RunConfig, prompt_tokens: float, completion_tokens: float) -> float:
    """Of a trajectory and its score: ids and logprobs (a teacher's too) of 4 bytes a token, and text of about
    as much."""
    tokens = 2 * prompt_tokens + (4 if config.reward.teachers else 3) * completion_tokens
    return BYTES_OF_A_TOKEN * tokens + BYTES_OF_AN_ENTRY


def redis_bytes(config: RunConfig, bytes_of_a_record: float = 0.0) -> int:
    """Memory of the run in Redis at its end; where a record's size is not known, that of the longest one."""
    trainer = config.trainer
    records = records_held(config) * (bytes_of_a_record or longest_record(config))
    a_step = BYTES_OF_A_COMMIT + BYTES_OF_A_SAMPLE * trainer.groups_per_step * config.largest_group_size
    return int(records + commits_held(config) * a_step) + archive_backlog(config, bytes_of_a_record)


def archive_backlog(config: RunConfig, bytes_of_a_record: float = 0.0) -> int:
    """What Redis keeps on top until a file of the archive is full: never more than there is of a run."""
    archive, trainer = config.streams.archive, config.trainer
    if not (config.streams.trim and archive.enabled):
        return 0
    all_records = (
        (1 + trainer.max_staleness + trainer.steps) * trainer.groups_per_step * config.largest_group_size
    )
    rest = (all_records - records_held(config)) * (bytes_of_a_record or longest_record(config))
    return int(min(BACKLOG * archive.segment_mb * 2**20, rest))


def longest_record(config: RunConfig) -> float:
    """Bytes of a trajectory of full length, with its score."""
    return record_bytes(config, config.data.max_prompt_tokens, config.rollout.sampling.max_tokens)


def archive_bytes(config: RunConfig, bytes_of_a_record: float = 0.0) -> int:
    """Most space of the archive at the end of the run, before compression."""
    archive, trainer = config.streams.archive, config.trainer
    if not archive.enabled:
        return 0
    records = trainer.steps * trainer.groups_per_step * config.largest_group_size
    everything = records * (bytes_of_a_record or longest_record(config))
    return int(min(everything, (archive.keep_gb or math.inf) * 2**30))


def disk_bytes(config: RunConfig, times: StageTimes, model_bytes: int) -> dict[str, int]:
    """Space that the run's folder needs; what was not measured follows from the size of the model's files."""
    trainer = config.trainer
    weights = times.weights_bytes or model_bytes
    checkpoint = times.checkpoint_bytes or model_bytes * BYTES_OF_ADAM // BYTES_OF_A_PARAMETER
    return {
        "weights": (trainer.keep_weights + SPARE_WEIGHTS) * weights,
        "checkpoints": (trainer.keep_checkpoints + 1) * checkpoint,
        "archive": archive_bytes(config, times.record_bytes),
    }


def _over(work: float, rate: float) -> float:
    return work / rate if rate else 0.0


def _ceiling(number: float) -> int:
    return max(1, math.ceil(number - 1e-9))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs, and why."""

    config: RunConfig
    times: StageTimes
    now: Workers
    """Those of the config; of a run that was measured, those that it has."""
    needed: Workers
    verdict: Bottleneck | None
    """Of the run that was measured."""
    model_bytes: int = 0

    def step(self, workers: Workers) -> StepTime:
        """What a step takes with these workers."""
        return step_time(self.config, self.times, workers)

    @property
    def one_more(self) -> dict[str, StepTime]:
        """What a step takes with one more worker of each kind."""
        now = self.now
        return {
            "rollout": self.step(Workers(now.rollout + 1, now.reward)),
            "reward": self.step(Workers(now.rollout, now.reward + 1)),
        }

    @property
    def bottleneck(self) -> str:
        """The slowest stage: as the run that was measured tells, and else as the formulas do."""
        return self.verdict.stage if self.verdict else self.step(self.now).slowest

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        name, per_s = limit_of_scores(self.config, self.times)
        target_s = slowest_other(self.config, self.times, self.now.rollout)
        return {
            "source": self.times.source,
            "bottleneck": self.bottleneck,
            "verdict": self.verdict.as_dict() if self.verdict else None,
            "times": asdict(self.times),
            "workers": {"now": asdict(self.now), "needed": asdict(self.needed)},
            "step": {
                "measured_s": self.times.step_s,
                "now": asdict(self.step(self.now)),
                "idle": {
                    "trainer": self.step(self.now).trainer_idle,
                    "rollout": self.step(self.now).rollout_idle,
                },
                "needed": asdict(self.step(self.needed)),
                "one_more": {role: asdict(step) for role, step in self.one_more.items()},
            },
            "reward": {
                "slowest_other_s": target_s,
                "time_for_scores_s": time_for_scores(self.config, self.times, self.now.rollout),
                "limit": {"reward": name, "scores_per_s": per_s} if name else None,
            },
            "redis_bytes": redis_bytes(self.config, self.times.record_bytes),
            "disk_bytes": disk_bytes(self.config, self.times, self.model_bytes),
        }
