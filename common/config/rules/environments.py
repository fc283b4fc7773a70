"""Checks of sessions with an environment, and of the environment's own rewards."""

from typing import TYPE_CHECKING

from tidemill.common.config.section import Rules, listed

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig


def find_problems(run: "RunConfig") -> Rules:
    environment = run.rollout.environment
    algorithm = run.trainer.algorithm
    environment_rewards = [name for name, reward in run.reward.named.items() if reward.environment]
    if environment_rewards and environment.is_single_turn:
        yield (
            f"reward.rewards.{listed(environment_rewards)} is the environment's own reward, "
            "and rollout.environment.use is single_turn, which gives none: name an environment there, or "
            "take another reward"
        )
    if (
        environment_rewards
        and algorithm.loss_traits.level == "sequence"
        and algorithm.advantage_traits.has_discount
    ):
        yield (
            f"trainer.algorithm.loss: {algorithm.loss} needs one advantage for a session, but advantage: "
            f"{algorithm.advantage} places the environment's rewards of single turns "
            f"(reward.rewards.{listed(environment_rewards)}) on their tokens. Take loss ppo, or another "
            "advantage"
        )
    if algorithm.overlong.penalty and not environment.is_single_turn and not environment.max_tokens:
        yield (
            "trainer.algorithm.overlong punishes sessions that come near the limit of their tokens, and "
            "there is none: set rollout.environment.max_tokens, or leave the punishment out"
        )
