"""Columns on their way from samples to the loss: what a sample has, and what stands where it has none."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.models import PIECES, make_policy
from tests.support.samples import changed, sample_of, taught
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.tokens import LOGPROB_FLOOR, Surrogate, Tokens
from tidemill.services.trainer.groups.columns import COLUMNS, trained_names
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.batch_tokens import BatchTokens
from tidemill.services.trainer.policy.packing import make_rows, plan_tiles
from tidemill.services.trainer.policy.tile import Tile, lay_out

LOGPROB = -0.5
"""The current one of each token."""


def tokens_of(*samples: Sample, is_at_start: bool = False) -> Tokens:
    """The trained tokens in one padded tile, longest sample first."""
    rows = make_rows(samples, [sample.mask for sample in samples])
    plan = plan_tiles(rows, "padded", 100)
    (tokens,) = tokens_of_tiles(plan, MicroBatch(samples, is_at_start))
    return tokens


def tokens_of_tiles(plan: list[Tile], batch: MicroBatch) -> list[Tokens]:
    batch_tokens = BatchTokens(plan, batch, "token")
    tokens = []
    for number, planned in enumerate(plan):
        tile = lay_out(planned)
        current_N = torch.full((len(tile.targets_N),), LOGPROB, dtype=torch.float64)
        ones_N = torch.ones_like(current_N)
        scored = replace(
            tile, logprobs_N=current_N, entropies_N=ones_N, log_mass_N=torch.zeros_like(current_N)
        )
        tokens.append(batch_tokens.of_tile(number, scored, {}))
    return tokens


def plain(index: int, num_tokens: int) -> Sample:
    logprobs = -np.arange(1.0, num_tokens + 1)
    return sample_of((0, index), [3, 4], range(5, 5 + num_tokens), logprobs, advantage=0.25)


def test_a_column_is_at_the_trained_tokens_of_its_samples():
    mask = np.array([True, False, True])
    tokens = tokens_of(changed(plain(0, 3), mask=mask), plain(1, 2))
    assert tokens.rollout_logprobs_N.tolist() == [-1.0, -3.0, -1.0, -2.0]
    assert tokens.advantages_N.tolist() == [0.25] * 4
    assert tokens.sequence_N.tolist() == [0, 0, 1, 1]
    assert tokens.columns.keys() == {"rollout_logprobs", "advantages"}


def test_a_sample_without_a_teacher_has_weight_0_beside_others():
    tokens = tokens_of(taught(plain(0, 3), [-7.0, -8.0, -9.0], 0.5), plain(1, 2))
    assert tokens.columns["teacher_logprobs"].tolist() == [-7.0, -8.0, -9.0, 0.0, 0.0]
    assert tokens.teacher_weights_N.tolist() == [0.5, 0.5, 0.5, 0.0, 0.0]
    assert tokens_of(plain(1, 2)).teacher_weights_N is None


def test_each_tile_gets_its_tokens_with_the_columns_of_its_samples_alone():
    """One tile a sample, longest first: a tile without a teacher and demonstrations does not know of them."""
    demonstration = changed(plain(2, 4), imitation=0.5)
    samples = (plain(0, 3), taught(plain(1, 2), [-7.0, -8.0], 0.5), demonstration)
    rows = make_rows(samples, [sample.mask for sample in samples])
    of_shown, of_plain, of_taught = tokens_of_tiles(plan_tiles(rows, "padded", 1), MicroBatch(samples))
    assert [len(tokens.weights_N) for tokens in (of_shown, of_plain, of_taught)] == [4, 3, 2]
    assert of_shown.imitation_N.tolist() == [0.5] * 4
    assert of_shown.teacher_weights_N is None and of_plain.teacher_weights_N is None
    assert of_plain.imitation_N is None and of_taught.imitation_N is None
    assert "teacher_logprobs" not in of_plain.columns
    assert of_taught.columns["teacher_logprobs"].tolist() == [-7.0, -8.0]
    assert of_taught.teacher_weights_N.tolist() == [0.5, 0.5]
    for tokens, sample in ((of_plain, samples[0]), (of_taught, samples[1])):
        assert tokens.columns["rollout_logprobs"].tolist() == sample.rollout_logprobs.astype(float).tolist()
        assert (tokens.num_sequences, tokens.sequence_N.unique().tolist()) == (1, [0])


def test_what_only_some_sampled_completions_have_is_an_error():
    with pytest.raises(AssertionError, match="values as a whole or not at all"):
        tokens_of(changed(plain(0, 3), values=np.zeros(3, np.float32)), plain(1, 2))


def test_a_demonstration_has_for_every_column_the_value_of_the_table():
    columns = {name: np.full(3, 0.75) for name in trained_names()}
    sampled = changed(plain(0, 3), **columns | {"rollout_logprobs": np.full(3, 0.75, np.float32)})
    demonstration = changed(plain(1, 2), imitation=0.5)
    tokens = tokens_of(sampled, demonstration).comparable()
    assert tokens.columns.keys() == set(trained_names())
    for name, values_N in tokens.columns.items():
        expected = COLUMNS[name].of_demonstration
        assert values_N[:3].tolist() == [0.75] * 3
        assert values_N[3:].tolist() == [LOGPROB if expected == "current" else expected] * 2, name
    assert tokens.entropies_N.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_demonstrations_alone_have_advantages_of_0():
    demonstration = changed(plain(0, 2), imitation=0.5)
    del demonstration.columns["advantages"]
    assert tokens_of(demonstration).advantages_N.tolist() == [0.0, 0.0]


def test_logprobs_of_models_are_floored_and_those_of_the_rollout_are_not():
    far = np.full(2, -1e6, np.float32)
    columns = {"proximal_logprobs": far, "reference_logprobs": far, "rollout_logprobs": far}
    tokens = tokens_of(changed(plain(0, 2), **columns)).comparable()
    assert tokens.columns["proximal_logprobs"].tolist() == [LOGPROB_FLOOR] * 2
    assert tokens.columns["reference_logprobs"].tolist() == [LOGPROB_FLOOR] * 2
    assert tokens.rollout_logprobs_N.tolist() == [-1e6] * 2


def test_at_the_start_of_a_step_the_proximal_policy_is_the_current_one():
    sample = changed(plain(0, 2), proximal_logprobs=np.full(2, -9.0, np.float32))
    assert "proximal_logprobs" in tokens_of(sample).columns
    assert "proximal_logprobs" not in tokens_of(sample, is_at_start=True).columns


def test_a_column_has_a_number_for_each_completion_token():
    sample = plain(0, 3)
    with pytest.raises(ValueError, match=r"values of shape \(2,\), not \(3,\)"):
        sample.fill("values", np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="advantage nan must be finite"):
        sample.set_advantage(float("nan"))


def test_a_new_column_is_a_row_and_reaches_the_loss_and_the_policys_surrogate(monkeypatch):
    """Broken, a column that the table names would have to be named a second time on its way."""
    monkeypatch.setitem(COLUMNS, "surprise", COLUMNS["advantages"])
    sample = plain(0, 2)
    sample.fill("surprise", np.array([1.0, 2.0]))
    assert tokens_of(sample).columns["surprise"].tolist() == [1.0, 2.0]
    assert tokens_of(sample).comparable().columns["surprise"].tolist() == [1.0, 2.0]
    policy = make_policy()
    seen: list[list[float]] = []

    def surrogate(tokens: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
        seen.append(tokens.columns["surprise"].tolist())
        return Surrogate(tokens.columns["surprise"] * tokens.logprobs_N)

    policy._surrogate = surrogate
    assert max(sample.completion_ids) < len(PIECES)
    assert policy.accumulate(MicroBatch((sample,))).tokens == 2
    assert seen == [[1.0, 2.0]]


def test_advantages_have_one_writer_which_changes_all_or_nothing():
    sample = plain(0, 3)
    with pytest.raises(AssertionError, match="set_advantage"):
        sample.fill("advantages", np.zeros(3))
    for value in (float("nan"), np.array([1.0, np.inf, 0.0]), np.zeros(2)):
        with pytest.raises(ValueError, match="advantage"):
            sample.set_advantage(value)
        assert sample.advantage == 0.25
        assert sample.columns["advantages"].tolist() == [0.25] * 3
    sample.set_advantage(np.array([1.0, 2.0, 3.0]))
    assert sample.advantage is None and sample.mean_advantage == 2.0
