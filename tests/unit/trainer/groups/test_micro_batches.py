"""Micro-batches: the token budget, determinism, and rebuilding what a commit recorded."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.models import make_samples
from tests.support.training import plain_sample
from tidemill.common.errors import TidemillError
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.samples import MicroBatch, Sample, rebuild


def sample_of(num_tokens: int, ticket: int, index: int = 0) -> Sample:
    """Two prompt tokens, the rest completion."""
    return plain_sample(ticket, index, 1.0, num_tokens - 2)


def test_first_fit_after_sorting_by_length():
    samples = [sample_of(length, ticket) for ticket, length in enumerate([2, 4, 3, 5])]
    batches = form_micro_batches(samples, max_tokens=7)
    # longest first: 5 opens a batch, 4 the next, 3 fits beside 4, 2 beside 5
    assert [[sample.num_tokens for sample in batch.samples] for batch in batches] == [[5, 2], [4, 3]]


def test_a_sample_above_the_budget_has_a_micro_batch_of_its_own():
    samples = [sample_of(50, 0), sample_of(3, 1), sample_of(60, 2)]
    batches = form_micro_batches(samples, max_tokens=10)
    assert [batch.keys for batch in batches] == [((2, 0),), ((0, 0),), ((1, 0),)]


def test_a_composition_survives_the_commit_and_is_rebuilt_exactly():
    samples = make_samples(20)
    batches = form_micro_batches(samples, 40)
    commit = Commit(step=0, version=1, groups=(0,), mini_batches=(tuple(batch.keys for batch in batches),))
    stored = Commit.model_validate(json.loads(commit.model_dump_json())).mini_batches[0]
    again = rebuild(stored, {sample.key: sample for sample in samples})
    assert [batch.samples for batch in again] == [batch.samples for batch in batches]


def test_rebuilding_names_what_is_missing():
    samples = {sample.key: sample for sample in make_samples(4)}
    with pytest.raises(TidemillError, match=r"1 of its trajectories .* \(9, 9\)"):
        rebuild([[(0, 0), (9, 9)]], samples)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_logprobs": np.zeros(2, dtype=np.float32)}, "3 completion ids, 2 logprobs"),
        ({"mask": np.ones(5, dtype=np.bool_)}, "a mask of 5"),
        ({"prompt_ids": np.zeros(0, dtype=np.int32)}, "prompt is empty"),
        ({"advantage": float("nan")}, "must be finite"),
        ({"reward": float("inf")}, "must be finite"),
        ({"rollout_logprobs": np.array([0, np.nan, 0], dtype=np.float32)}, "logprobs must be finite"),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_never_built(change, message):
    with pytest.raises(ValueError, match=message):
        replace(sample_of(5, 0), **change)


def test_counts_of_a_micro_batch():
    sample = sample_of(5, 0)
    masked = replace(sample_of(4, 1), mask=np.array([True, False]))
    batch = MicroBatch((sample, masked))
    assert (batch.num_tokens, batch.num_trained) == (9, 4)
