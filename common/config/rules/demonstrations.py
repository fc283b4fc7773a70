"""Checks that settings fit demonstrations, of which each step has a fixed share."""

from typing import TYPE_CHECKING

from tidemill.common.config.section import Rules

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig


def find_problems(run: "RunConfig") -> Rules:
    trainer = run.trainer
    temperature = run.rollout.sampling.temperature
    whose = f"the demonstrations of source {run.data.demonstrations[0].name!r}"
    if trainer.batch_order != "in_order":
        yield (
            f"trainer.batch_order: {trainer.batch_order} takes what is there first, and a step has an "
            f"exact share of {whose}; take in_order"
        )
    if temperature != 1.0:
        yield (
            f"rollout.sampling.temperature is {temperature:g}, and {whose} are imitated at temperature "
            "1; sample at temperature 1"
        )
    if trainer.algorithm.needs_values:
        yield (
            f"trainer.algorithm.advantage: {trainer.algorithm.advantage} learns values of rewards, and "
            f"{whose} have none; take another advantage"
        )
