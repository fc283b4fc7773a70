"""Every published algorithm by name trains arith above its start."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.algorithms import trains_above_its_start
from tidemill.common.redis.embedded import EmbeddedRedis

KL = {"reference": {"model": "frozen"}, "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.001}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "dapo": {"preset": "dapo", "filter_zero_variance": False},
    "gspo": {"preset": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    "cispo": {"preset": "cispo"},
    "rloo": {"preset": "rloo", **KL},
    "reinforce_plus_plus": {"preset": "reinforce_plus_plus", **KL},
    "ppo": {"preset": "ppo", "value": {"lr": 2e-3}, "entropy_coefficient": 0.001},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "loss": "reinforce"},
    "pass_at_k": {"advantage": "pass_at_k", "pass_k": 2},
    "sapo": {"loss": "sapo", "importance": {"level": "geometric"}},
    "icepop with kl in the loss": {
        "importance": {"mode": "mask", "low": 0.5, "high": 5.0},
        "reference": {"model": "updated", "every": 2},
        "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.01},
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_trains_arith_above_its_start(name: str, redis: EmbeddedRedis, tmp_path: Path) -> None:
    await trains_above_its_start(name, ALGORITHMS[name], redis, tmp_path)
