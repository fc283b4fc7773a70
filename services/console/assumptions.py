"""Reads `--assume reward=5s,rollout=2000tok/s,trainer=30s`: stage times that somebody expects."""

import re

from common.config import RunConfig
from common.errors import ConfigError
from services.console.stage_times import StageTimes

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
}
"""What may be assumed, in words, and an example."""
NEEDED = ("reward", "rollout", "trainer")
UNITS = {"rollout": ("tok/s", "tokens/s", ""), "tokens": ("tok", "tokens", ""), "at_once": ("",)}
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
