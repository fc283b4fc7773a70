"""CONTRIBUTING's recipes: adding a loss, an advantage, a column, a metric or a setting of sampling is one
file or one row. They are followed in a copy of the repository, and a process with that copy shows that they
work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]

LOSS_FILE = '''
"""A loss."""

from typing import TYPE_CHECKING

from pydantic import Field

from tidemill.common.config.algorithms.loss import Loss, Surrogate, Tokens
from tidemill.common.config.algorithms.settings import Settings

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


class ScaledSettings(Settings):
    """Settings of `scaled`."""

    scaled_by: float = Field(1.0, gt=0.0, le=10.0)
    """Factor of the objective."""


def scaled(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """factor * r A. r = 1.5, A = 2, factor 2: 6."""
    return Surrogate(ScaledSettings.of(algorithm).scaled_by * ratio.ratio_N * ratio.advantages_N)


LOSSES = (Loss(name="scaled", surrogate=scaled, summary="`scaled_by` r A", settings=ScaledSettings),)
'''
LOSS_PROOF = """
from types import SimpleNamespace

import torch

from infra.docs.algorithm_tables import loss_table
from infra.docs.config_page import as_markdown
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss

algorithm = AlgorithmConfig(loss="scaled", scaled_by=2.0)
tokens = SimpleNamespace(ratio_N=torch.tensor([1.5]), advantages_N=torch.tensor([2.0]))
assert find_loss(algorithm)(tokens, algorithm).objective_N.tolist() == [6.0]
assert "| `scaled` | `scaled_by` r A |" in loss_table()
assert "`scaled_by=1.0` Factor of the objective." in as_markdown()
"""

ADVANTAGE_FILE = '''
"""An advantage."""

from tidemill.common.config.algorithms.advantage import Advantage, Rewards, finite_rewards, of_rewards
from tidemill.common.wire.arrays import Float64


def doubled(rewards: Rewards) -> Float64:
    """2 r. Shape [G]. Rewards 1, 3 give 2, 6."""
    doubled_G: Float64 = 2.0 * finite_rewards(rewards)
    return doubled_G


ADVANTAGES = (Advantage(name="doubled", estimate=of_rewards(doubled), summary="2 r"),)
'''
ADVANTAGE_PROOF = """
from infra.docs.algorithm_tables import advantage_table
from tests.support.samples import assigned
from tests.support.training import group_of_samples, plain_sample, trainer_config
from tidemill.services.trainer.algorithm.advantages import Advantages

advantages = Advantages(trainer_config(algorithm={"advantage": "doubled"}))
(group,) = assigned(advantages, group_of_samples(0, plain_sample(0, 0, 1.0), plain_sample(0, 1, 3.0)))
assert [float(sample.advantage) for sample in group.samples] == [2.0, 6.0]
assert "| `doubled` | 2 r | group | its group |" in advantage_table()
"""

COLUMN_ROW = """    # By a test.
    "surprises": Column(),
    # By the estimator of advantages.
"""
COLUMN_PROOF = """
from dataclasses import replace

import numpy as np
import torch

from tests.support.samples import sample_of
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.batch_tokens import BatchTokens
from tidemill.services.trainer.policy.packing import make_rows, plan_tiles
from tidemill.services.trainer.policy.tile import lay_out

sample = sample_of((0, 0), [3, 4], [5, 6], [-1.0, -2.0], advantage=0.25)
sample.fill("surprises", np.array([0.5, 0.75], np.float32))
rows = make_rows([sample], [sample.mask])
plan = plan_tiles(rows, "padded", 100)
zeros_N = torch.zeros(2)
scored = replace(lay_out(plan[0]), logprobs_N=zeros_N, entropies_N=zeros_N, log_mass_N=zeros_N)
tokens = BatchTokens(plan, MicroBatch((sample,)), "token").of_tile(0, scored, {})
assert tokens.columns["surprises"].tolist() == [0.5, 0.75]
"""

METRIC_LINE = """    # Before weights: a demonstration's token counts in the denominator as any other does.
    sums["surprise_sum"] = tokens.of_sampled(-tokens.logprobs_N.detach()).sum()
"""
METRIC_PROOF = """
import math

import pytest

from tests.support.losses import make_tokens
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.policy_loss import policy_loss
from tidemill.services.trainer.algorithm.losses.sums import Sums, add_tiles, loss_metrics
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss

algorithm = AlgorithmConfig()
tokens = make_tokens([0.5, 0.125], [0.5, 0.125], [1.0, 1.0])
_, tile = policy_loss(tokens, algorithm, find_loss(algorithm))
metrics = loss_metrics(Sums(tokens=2, denominator=2.0) + add_tiles([tile]))
assert metrics["surprise"] == pytest.approx(2 * math.log(2))
"""

SAMPLING_ROW = '''
    typical_p: float = Field(1.0, gt=0.0, le=1.0)
    """Probability of the typical ids that are kept; 1: all."""

    def filters('''
SAMPLING_PROOF = """
import pytest
import torch

from infra.docs.config_page import as_markdown
from tests.support.training import trainer_config
from tidemill.common.config.sources import SourceConfig
from tidemill.common.errors import EngineError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.decoding import SamplingBatch

config = trainer_config(rollout__sampling={"typical_p": 0.5, "max_tokens": 4})
assert config.trainer.evaluation.typical_p == 1.0
assert SourceConfig(name="a", path="a.jsonl", sampling={"typical_p": 0.5}).sampling == {"typical_p": 0.5}
assert "`typical_p=1.0` `(0,1]` Probability of the typical ids that are kept; 1: all." in as_markdown()
sampling = SamplingParams(**config.rollout.sampling.model_dump())
assert sampling.is_filtered and config.masked_sources == {""}
assert sampling.filters()["typical_p"] == 0.5, "what vLLM is given"
assert SamplingParams.model_validate(sampling.model_dump()) == sampling
assert "typical_p" not in SamplingParams(max_tokens=4).model_dump(), "older workers do not know it"
with pytest.raises(EngineError, match="does not have typical_p"):
    SamplingBatch.of([sampling], 8, torch.device("cpu"))
"""


FILES = {
    "common/config/algorithms/with_settings/scaled.py": LOSS_FILE,
    "common/config/algorithms/advantages/doubled.py": ADVANTAGE_FILE,
}
ROWS = {
    "services/trainer/groups/columns.py": ("    # By the estimator of advantages.\n", COLUMN_ROW),
    "services/trainer/algorithm/losses/policy_loss.py": (METRIC_LINE.partition("    sums[")[0], METRIC_LINE),
    "common/wire/sampling.py": ("\n    def filters(", SAMPLING_ROW),
}
"""By file: the text in whose place the row stands, with this text after or before it."""
PROOFS = (LOSS_PROOF, ADVANTAGE_PROOF, COLUMN_PROOF, METRIC_PROOF, SAMPLING_PROOF)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What a process imports of the repository."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for folder in ("common", "services", "tidemill", "infra", "tests/support"):
        shutil.copytree(REPO / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    return tmp_path


def test_a_loss_an_advantage_a_column_a_metric_and_a_setting_of_sampling_are_one_file_or_row_each(copy):
    for name, text in FILES.items():
        assert not (copy / name).exists()
        (copy / name).write_text(text.lstrip())
    for name, (before, row) in ROWS.items():
        text = (copy / name).read_text()
        assert text.count(before) == 1, f"{name} has {before!r} {text.count(before)} times"
        (copy / name).write_text(text.replace(before, row))
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    # One process: what it imports takes most of the time.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(PROOFS)], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
