"""Every published algorithm, and the parts that others are made of, train arith above its start."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.example_algorithms import scale_rl_settings
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun
from tests.support.training import commits_of
from tidemill.common.config import load_config
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import read_state
from tidemill.common.wire.messages import Commit

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
    # Parts that the losses and advantages of the tables in tests/unit/trainer/algorithm are made of.
    "critic": {"preset": "ppo", "value": {"lr": 1e-3, "model": "own"}},
    "scalerl": {**scale_rl_settings(), "filter_zero_variance": False},
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


STEPS = 6
LEAST_GAIN = 0.05
"""With these seeds the score rises from 0.32 to between 0.45 and 0.6."""


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_trains_arith_above_its_start(name: str, redis: EmbeddedRedis, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name]
    steps = LONGER.get(name, STEPS)
    config = load_config(
        REPO / "examples/arith/config.yaml",
        [
            f"trainer.steps={steps}",
            "trainer.groups_per_step=16",
            "trainer.group_size=8",
            "trainer.mini_batches=2",
            "trainer.max_staleness=0",
            "trainer.checkpoint_every=100",
            "trainer.loggers=[]",
            "trainer.evaluation={every: 0, max_prompts: 128, temperature: 1.0}",
            "trainer.optimizer={lr: 2.0e-4}",
            f"trainer.algorithm={algorithm}",
        ],
    )
    run_id = name.replace(" ", "-")
    async with ServiceRun(tmp_path, config, run_id, redis.url) as run:
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        evaluations = (await read_state(run.broker, run.keys))["evaluations"]
    assert len(commits) == steps
    assert len({commit.digest for commit in commits}) == steps, "every step changed the weights"
    assert [item["version"] for item in evaluations] == [0, steps]
    assert evaluations[1]["score"] > evaluations[0]["score"] + LEAST_GAIN, evaluations
    assert_is_what_it_says(algorithm, commits)


def assert_is_what_it_says(algorithm: dict[str, Any], commits: list[Commit]) -> None:
    """The parts that the config asks for were at work."""
    last = commits[-1].metrics
    assert last["mini_batches"] == 2.0
    assert (last["kl"] != 0.0) is ("kl" in algorithm), "a reference is there exactly where it is asked for"
    assert ("value/explained_variance" in last) is (algorithm.get("preset") == "ppo")
    assert 0.0 < last["sampling/effective_sample_size"] <= 1.0
    baselines = [(ticket, 0, "greedy_baseline") for ticket in sorted(commits[-1].groups)]
    assert sorted(commits[-1].dropped) == (baselines if algorithm.get("advantage") == "remax" else [])
    assert last["rollout_kl"] > 0.0, "the policy has moved within the step"
