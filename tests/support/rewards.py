"""Rewards for tests: any object with a `score` method, with the attempts and limits of real ones."""

from typing import Any

from tidemill.common.config import NamedRewardConfig, RewardConfig
from tidemill.services.reward.rewards.named import NamedReward
from tidemill.services.reward.rewards.weighted_sum import WeightedSum
from tidemill.services.reward.worker import Scorer


def alone(reward: Any, config: RewardConfig) -> WeightedSum:
    """`reward` as the only one of a run, under the limits of its section."""
    (named,) = config.named.values()
    return WeightedSum([NamedReward("reward", named, reward)], is_named=False)


def together(rewards: dict[str, tuple[Any, dict[str, Any]]]) -> WeightedSum:
    """Several rewards by name, each with the fields of its own config."""
    return WeightedSum(
        [
            NamedReward(name, NamedRewardConfig(**({"function": "gsm8k", "backoff_s": 0.0} | fields)), reward)
            for name, (reward, fields) in rewards.items()
        ],
        is_named=True,
    )


def scorer_of(reward: Any, config: RewardConfig, worker: str = "w1", seed: int = 0) -> Scorer:
    """A scorer with this reward alone."""
    return Scorer(alone(reward, config), config, worker, seed)
