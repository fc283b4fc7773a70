"""Checks for an advantage that compares each reward by itself."""

from typing import TYPE_CHECKING

from tidemill.common.config.section import Rules, listed

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig


def find_problems(run: "RunConfig") -> Rules:
    rewards = run.reward.rewards
    advantage = f"trainer.algorithm.advantage: {run.trainer.algorithm.advantage}"
    num_rewards = sum("train" in reward.lanes for reward in rewards.values())
    of_sources = [name for name, reward in rewards.items() if reward.sources]
    if num_rewards < 2:
        yield (
            f"{advantage} normalises each reward by itself before they are added up, and reward.rewards "
            f"has {num_rewards} for training; name several there, or take grpo_batch"
        )
    if of_sources:
        yield (
            f"reward.rewards.{listed(of_sources)} scores some sources only, and {advantage} adds up every "
            "reward of every group; take grpo_batch, or let all rewards score all sources"
        )
    if run.reward.group:
        yield (
            f"reward.group: {run.reward.group} changes the sum of a sample's rewards, and {advantage} "
            "looks at each reward by itself and would not see it; leave one of them out"
        )
