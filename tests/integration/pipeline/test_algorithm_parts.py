"""The parts that algorithms are made of train arith above its start: one run for each mechanism.

Other losses and advantages differ from these in numbers alone; those are in tests/unit/trainer/algorithm, and
their replay is in tests/unit/trainer/test_step.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.algorithms import STEPS, trains_above_its_start
from tidemill.common.redis.embedded import EmbeddedRedis

ALGORITHMS: dict[str, dict[str, Any]] = {
    "critic": {"preset": "ppo", "value": {"lr": 1e-3, "model": "own"}},
    "scalerl": {"preset": "scalerl", "filter_zero_variance": False},
    "remax": {"advantage": "remax", "loss": "reinforce"},
    "dppo": {"loss": "dppo_tv", "old_logprobs": "rollout", "rollout_penalty": 0.001},
    "weights and rejection": {
        "correction": "decoupled_geo_rs_token_tis",
        "rejection": {"bounds": {"seq_mean_k1": [0.9, 1.1]}},
    },
    "top entropy and normalised weights": {"top_entropy_quantile": 0.5, "importance": {"normalise": True}},
    "gmpo": {"loss": "gmpo", "old_logprobs": "rollout", "normalisation": "sequence"},
    "clip_cov": {"loss": "clip_cov", "covariance": {"share": 0.01, "low": 0.1}},
}
LONGER = {"remax": 15}
"""One greedy answer is a rough baseline: it takes more steps."""


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_trains_arith_above_its_start(name: str, redis: EmbeddedRedis, tmp_path: Path) -> None:
    await trains_above_its_start(name, ALGORITHMS[name], redis, tmp_path, LONGER.get(name, STEPS))
