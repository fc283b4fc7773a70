"""What one step asks of each stage: measured on a run, or assumed. The numbers that sizing computes with."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.process.activity import WAIT
from tidemill.common.run.weight_files import WEIGHTS_FOLDER, folder_versions, read_manifest, version_name
from tidemill.services.console.status.bottleneck import RATE_STEPS, Evidence, state_of

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
    sigma: float = 0.0
    """Of the lengths of completions, log-normal; 0 where it is not known."""
    alone_s: float = 0.0
    """What a completion of mean length takes by itself, in an engine that has no other; with `sigma`."""
    variation: float = 0.0
    """Of the tokens of a step: standard deviation over mean."""
    step_s: float | None = None
    """As measured; None where nothing was."""

    def scaled_to(self, config: RunConfig) -> "StageTimes":
        """The times of a step of another size: work grows with the number of completions."""
        wanted = config.trainer.groups_per_step * config.trainer.group_size
        factor = wanted / (self.trained or self.completions)
        return replace(
            self, completions=self.completions * factor, trained=wanted, trainer_s=self.trainer_s * factor
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
        variation=_variation([numbers.get("completions/mean_length", 0.0) for numbers in known]),
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
    """Size of the newest version in a folder, of a delta's in full; 0 where there is none."""
    versions = folder_versions(folder)
    if not versions:
        return 0
    with suppress(WeightsError):
        if (manifest := read_manifest(folder.parent, versions[-1])) and manifest.is_delta:
            return manifest.full_bytes
    files = (folder / version_name(versions[-1])).rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _variation(values: Sequence[float]) -> float:
    """Standard deviation over mean; 0 where there are too few to tell."""
    return stdev(values) / mean(values) if len(values) > 2 and mean(values) > 0 else 0.0


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(numbers.get(name, 0.0) for numbers in steps) / len(steps)


NUMBER = r"(?P<number>[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)"
SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}
FORMS = {
    "reward": ("time of one score", "5s"),
    "reward_p95": ("what 95 % of the scores stay below", "20s"),
    "rollout": ("speed of one rollout worker", "2000tok/s"),
    "trainer": ("the trainer's work on one step", "30s"),
    "tokens": ("length of a completion", "400tok"),
    "at_once": ("scores that one reward worker works on at once", "256"),
    "redis": ("what the trainer waits for Redis in a step", "0.1s"),
    "sigma": ("spread of the lengths, log-normal; 1 where one in a hundred is ten times the median", "1"),
    "alone": ("what a completion takes by itself in an engine without others; with sigma", "20s"),
    "vary": ("how much the tokens of a step differ, as a share of their mean", "0.2"),
}
"""What may be assumed, in words, and an example."""
NEEDED = ("reward", "rollout", "trainer")
UNITS = {"rollout": ("tok/s", "tokens/s", ""), "tokens": ("tok", "tokens", ""), "at_once": ("",)}
UNITS |= {"sigma": ("",), "vary": ("",)}
"""Of what is no time."""


def assumed_times(text: str, config: RunConfig) -> StageTimes:
    """The times that a text gives.

    Raises:
        ConfigError: a part of it is not understood, or missing.
    """
    given = dict(_parse(part.strip()) for part in text.split(",") if part.strip())
    if missing := [name for name in NEEDED if name not in given]:
        raise ConfigError(f"--assume lacks {', '.join(missing)}. {_spell_forms()}")
    trainer, score_s = config.trainer, given["reward"]
    tokens = given.get("tokens", float(config.rollout.sampling.max_tokens))
    at_once = given.get("at_once", float(scores_at_once(config)))
    if ("sigma" in given) != ("alone" in given):
        raise ConfigError(f"--assume needs both of sigma and alone, or neither. {_spell_forms()}")
    return StageTimes(
        source=f"assumed: {text}",
        completions=trainer.groups_per_step * trainer.group_size,
        completion_tokens=tokens,
        rollout_tokens_per_s=given["rollout"],
        generation_s=0.0,
        score_s=score_s,
        score_p95_s=max(given.get("reward_p95", score_s), score_s),
        scores_per_s=at_once / score_s,
        trainer_s=given["trainer"],
        redis_s=given.get("redis", 0.0),
        sigma=given.get("sigma", 0.0),
        alone_s=given.get("alone", 0.0),
        variation=given.get("vary", 0.0),
    )


def scores_at_once(config: RunConfig) -> int:
    """How many samples a reward worker can score at once, as far as the config tells."""
    reward = config.reward
    runs_in_processes = all(named.kind == "function" for named in reward.named.values())
    return min(reward.processes, reward.max_in_flight) if runs_in_processes else reward.max_in_flight


def _parse(part: str) -> tuple[str, float]:
    name, sign, value = part.partition("=")
    name = name.strip()
    if not sign or name not in FORMS:
        raise ConfigError(f"--assume {part!r} is not understood. {_spell_forms()}")
    match = re.fullmatch(rf"{NUMBER}\s*(?P<unit>[a-z/]*)", value.strip())
    units = {unit: 1.0 for unit in UNITS[name]} if name in UNITS else SECONDS
    if match is None or match["unit"] not in units or float(match["number"]) <= 0:
        example = FORMS[name][1]
        raise ConfigError(f"--assume {part!r}: expected a number above 0, such as {name}={example}.")
    return name, float(match["number"]) * units[match["unit"]]


def _spell_forms() -> str:
    forms = "; ".join(f"{name}={example} ({words})" for name, (words, example) in FORMS.items())
    return f"Known are: {forms}. reward, rollout and trainer have to be given."
