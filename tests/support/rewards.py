"""Rewards for tests: any object with a `score` method, with the attempts and limits of real ones."""

from types import SimpleNamespace
from typing import Any

from tidemill.common.config import NamedRewardConfig, RewardConfig
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.rewards.sandbox import SandboxReward
from tidemill.services.reward.rewards.weighted_sum import NamedReward, WeightedSum
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


def code_reward(broker: Broker, keys: Keys, config: SandboxConfig) -> SandboxReward:
    """A reward of code; the Redis of its jobs is that of the environment."""
    dependencies: Any = SimpleNamespace(broker=broker, keys=keys)
    return SandboxReward("code", NamedRewardConfig(sandbox=config), dependencies)
