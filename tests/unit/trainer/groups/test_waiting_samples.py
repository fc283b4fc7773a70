"""Samples wait until they half fill a micro-batch; the last ones of a mini-batch do not wait."""

import numpy as np

from tests.support.samples import sample_of
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.groups.waiting_samples import WaitingSamples


def samples_of(num_tokens: int, first_ticket: int) -> list[Sample]:
    """Samples of 10 tokens, none of which begins as another."""
    samples = []
    for ticket in range(first_ticket, first_ticket + num_tokens // 10):
        ids = 100 * ticket + np.arange(10)
        samples.append(sample_of((ticket, 0), ids[:5], ids[5:]))
    return samples


def tokens_of(batches: list[MicroBatch]) -> list[int]:
    return [10 * len(batch.samples) for batch in batches]


def test_a_micro_batch_of_100_tokens_is_taken_with_50_and_the_last_with_any():
    waiting = WaitingSamples((100, 1), "tree", is_at_start=True)
    assert waiting.take_full(samples_of(30, 0)) == []
    assert tokens_of(waiting.take_full(samples_of(40, 3))) == [70]
    (full,) = waiting.take_full(samples_of(130, 7))
    first_num = 10 * len(full.samples)
    assert 90 <= first_num <= 100, "the rest is less than 50"
    (last,) = waiting.take_last(samples_of(10, 20))
    assert 10 * len(last.samples) == 130 - first_num + 10
    assert full.is_at_start and last.is_at_start
    tickets = [sample.key[0] for batch in (full, last) for sample in batch.samples]
    assert sorted(tickets) == list(range(7, 21)), "each is trained once"
    assert waiting.take_last([]) == []
