"""Checks that sampling, loss and advantage fit the teachers of training."""

from typing import TYPE_CHECKING

from tidemill.common.config.rules.filters import FILTERED
from tidemill.common.config.section import Rules, listed

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig


def find_problems(run: "RunConfig") -> Rules:
    teachers = run.reward.teachers
    algorithm = run.trainer.algorithm
    temperature = run.rollout.sampling.temperature
    is_reward = algorithm.teacher.place == "reward"
    whose = f"the teacher reward.rewards.{listed(teachers)}"
    if temperature != 1.0:
        yield (
            f"rollout.sampling.temperature is {temperature:g}, and the logprobs of {whose} are those of "
            "temperature 1: sample at temperature 1"
        )
    if is_reward and run.is_sampling_filtered:
        yield (
            f"{FILTERED}, and trainer.algorithm.teacher.place: reward would take their distance from "
            f"{whose} for KL; sample unfiltered, or take place: loss"
        )
    has_weight = any(teacher.weight for teacher in teachers.values())
    if has_weight and is_reward and algorithm.loss_traits.level == "sequence":
        yield (
            f"trainer.algorithm.loss: {algorithm.loss} needs one advantage for a sequence, and {whose} "
            "gives one for each token. Take loss ppo or reinforce, or trainer.algorithm.teacher.place: "
            "loss"
        )
