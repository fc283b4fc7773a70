"""Bins: one forward pass on each rank, of like cost, the same from whichever side they are computed;
micro-batches on one rank, and rebuilding what a commit recorded."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.models import make_samples
from tests.support.samples import changed, sample_of
from tests.support.training import plain_sample
from tidemill.common.errors import TidemillError
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.groups.bins import (
    Bin,
    Layout,
    PrefixOrder,
    cost,
    form_micro_batches,
    split_groups,
    split_samples,
)
from tidemill.services.trainer.groups.micro_batch import MicroBatch, rebuild
from tidemill.services.trainer.groups.sample import Sample, SegmentTokens
from tidemill.services.trainer.groups.trie import MOST_KEYS
from tidemill.services.trainer.policy.packing import make_rows, plan_tiles

TILE = 400
LAYOUTS: list[Layout] = ["tree", "varlen", "padded"]


def random_step(seed: int, groups: int = 24, size: int = 4) -> list[Sample]:
    """Groups with a prompt in common and completions of very unequal lengths, some of which begin alike."""
    rng = np.random.default_rng(seed)
    samples = []
    for ticket in range(groups):
        prompt = rng.integers(0, 1 << 20, int(rng.integers(4, 60)))
        begun = rng.integers(0, 1 << 20, 20)
        for index in range(size):
            ending = rng.integers(0, 1 << 20, int(2 ** rng.uniform(2, 8.4)))
            samples.append(sample_of((ticket, index), prompt, [*begun[: int(rng.integers(0, 20))], *ending]))
    return samples


def in_terms_of(numbers: Sequence[int], indices: Sequence[int]) -> tuple[int, ...]:
    """Indices into `numbers` as these numbers."""
    return tuple(numbers[i] for i in indices)


def sizes_of(batch: MicroBatch) -> list[int]:
    return [sample.num_tokens for sample in batch.samples]


def num_tiles(samples: Sequence[Sample], layout: Layout) -> int:
    return len(plan_tiles(make_rows(samples, [sample.mask for sample in samples]), layout, TILE))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_each_rank_has_one_forward_pass_for_each_micro_batch(layout, size, seed):
    samples = random_step(seed)
    batches = form_micro_batches(samples, TILE, size, layout)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(s.key for s in samples)
    for batch in batches:
        shares = split_samples(batch.samples, size, TILE, layout)
        assert sorted(i for share in shares for i in share) == list(range(len(batch.samples)))
        tiles = []
        for share in shares:
            tiles.append(num_tiles([batch.samples[i] for i in share], layout))
        assert max(tiles) == 1


def test_shares_do_not_depend_on_who_computes_them():
    samples = random_step(5)
    expected = split_samples(samples, 4, TILE)
    order = np.random.default_rng(1).permutation(len(samples)).tolist()
    again = split_samples([samples[i] for i in order], 4, TILE)
    assert [in_terms_of(order, share) for share in again] == expected


def test_what_is_in_common_counts_once_and_attention_by_the_square():
    """20 + 30 + 10 tokens with a prompt of 20: pairs 50^2 / 2 and (30^2 - 20^2) / 2."""
    prompt = range(100, 120)
    samples = [sample_of((0, 0), prompt, range(30)), sample_of((0, 1), prompt, range(50, 60))]
    (whole,) = PrefixOrder(samples, "tree").cut(60)
    assert (whole.tokens, whole.row_tokens, whole.scores) == (60, 80, 1250 + 250)
    assert cost(whole, 1000.0) == 61.5
    assert len(PrefixOrder(samples, "tree").cut(59)) == len(PrefixOrder(samples, "varlen").cut(60)) == 2
    assert (PrefixOrder(samples, "tree").num_tokens, PrefixOrder(samples, "varlen").num_tokens) == (60, 80)


def test_rows_of_a_session_share_in_whatever_order_they_lie():
    """20 + 10 tokens, 30 of another prompt, and 10 more after the first 20."""
    first_prompt = SegmentTokens(np.arange(100, 120, dtype=np.int32), 10)
    another_prompt = SegmentTokens(np.arange(500, 520, dtype=np.int32), 10)
    segments = (first_prompt, another_prompt, first_prompt)
    completion_ids = np.arange(30, dtype=np.int32)
    columns = {"rollout_logprobs": np.zeros(30, np.float32)}
    sample = Sample((0, 0), segments, completion_ids, np.ones(30, np.bool_), columns)
    assert PrefixOrder([sample], "tree").num_tokens == 20 + 10 + 30 + 10


@pytest.mark.parametrize(("second_digest", "num_more"), [("a" * 32, 10), ("b" * 32, 30 + 10)])
def test_a_prompt_is_in_common_only_up_to_another_picture(second_digest, num_more):
    """Prompts of 60 tokens, of which a picture has those from 30 to 39, and completions of 10."""

    def seeing(index: int, digest: str) -> Sample:
        picture = Image(digest=digest, num_bytes=1, width=8, height=8, first=30, num_tokens=10)
        return sample_of((0, index), range(100, 160), [index] * 10, images=(picture,))

    samples = [seeing(0, "a" * 32), seeing(1, second_digest)]
    assert PrefixOrder(samples, "tree").num_tokens == 60 + 10 + num_more


def test_a_bin_has_no_more_keys_than_a_tile_may_copy():
    prompt = range(1000, 1000 + TILE - 40)
    samples = [sample_of((0, i), prompt, [i] * 4) for i in range(10)]
    pieces = PrefixOrder(samples, "tree").cut(TILE)
    assert [len(piece.members) for piece in pieces] == [4, 4, 2]
    assert max(piece.row_tokens for piece in pieces) <= MOST_KEYS * TILE


def test_a_group_is_divided_where_that_takes_less_time_and_not_for_a_fuller_bin():
    """Groups of 70 with a prompt of 10, in bins of 100: on one rank three bins compute 210, and parts of 40
    that fill them 240. On two ranks three bins take 70 + 35."""
    samples = [
        sample_of(
            (ticket, index), range(1000 * ticket, 1000 * ticket + 10), range(100 * index, 100 * index + 30)
        )
        for ticket in range(1, 4)
        for index in range(2)
    ]
    for size, expected in ((1, [2, 2, 2]), (2, [4, 2])):
        batches = form_micro_batches(samples, 100, size)
        assert [len(batch.samples) for batch in batches] == expected


def test_padding_counts_where_rows_are_padded():
    lengths = [100, 90, 30, 30, 30, 30]
    order = PrefixOrder([plain_sample(i, 0, 1.0, length - 2) for i, length in enumerate(lengths)], "padded")
    bins = order.fill(order.cut(200), 200)
    assert [sorted(each.members) for each in bins] == [[0, 1], [2, 3, 4, 5]]
    assert not Bin(rows=2, widest=100).takes(Bin(rows=1, widest=30), 200, "padded")


def test_long_and_short_samples_are_divided_by_cost_and_not_by_tokens():
    """One of 200 tokens and ten of 20."""
    samples = [plain_sample(i, 0, 1.0, length - 2) for i, length in enumerate([200, *[20] * 10])]
    shares = split_samples(samples, 2, 1000, "varlen", scores_of_a_token=200.0)
    # 200 + 200^2 / 2 / 200 = 300; 20 + 1 = 21 each
    assert shares == [(0,), tuple(range(1, 11))]
    shares = split_samples(samples, 2, 1000, "varlen", scores_of_a_token=1e9)
    for share in shares:
        assert sum(samples[i].num_tokens for i in share) == 200
    assert len(shares) == 2


def test_parts_of_a_group_do_not_depend_on_the_groups_beside_it():
    samples = random_step(7)
    first = [i for i, sample in enumerate(samples) if sample.key[0] == 3]
    alone = split_groups([samples[i] for i in first], 2, 300, "tree")
    beside = split_groups(samples, 3, 300, "tree")
    assert sorted(i for share in beside for piece in share for i in piece) == list(range(len(samples)))
    expected = {in_terms_of(first, piece) for share in alone for piece in share}
    assert {piece for share in beside for piece in share if piece[0] in first} == expected
    loads = [sum(map(len, share)) for share in beside]
    assert min(loads) > 0


def sized(num_tokens: int, ticket: int, index: int = 0) -> Sample:
    """Two prompt tokens, the rest completion."""
    return plain_sample(ticket, index, 1.0, num_tokens - 2)


def test_first_fit_after_sorting_by_length():
    samples = [sized(length, ticket) for ticket, length in enumerate([2, 4, 3, 5])]
    batches = form_micro_batches(samples, max_tokens=7)
    assert form_micro_batches([], 10) == []
    # longest first: 5 opens a batch, 4 the next, 3 fits beside 4, 2 beside 5
    assert list(map(sizes_of, batches)) == [[5, 2], [4, 3]]


def test_a_sample_above_the_budget_has_a_micro_batch_of_its_own():
    samples = [sized(50, 0), sized(3, 1), sized(60, 2)]
    batches = form_micro_batches(samples, max_tokens=10)
    assert [batch.keys for batch in batches] == [((2, 0),), ((0, 0),), ((1, 0),)]


def test_arrival_order_does_not_matter():
    samples = make_samples(40)
    expected = [batch.keys for batch in form_micro_batches(samples, 50)]
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    assert [batch.keys for batch in form_micro_batches(shuffled, 50)] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_groups_that_are_added_in_any_order_and_portions_lie_as_all_at_once(layout, seed):
    """Five portions of twelve groups, some of them empty; with the first seed the groups are in order."""
    samples = random_step(seed, groups=12)
    rng = np.random.default_rng(seed)
    tickets = rng.permutation(12) if seed else np.arange(12)
    order = PrefixOrder((), layout)
    for portion in np.split(tickets, sorted(rng.integers(0, 13, 4))):
        order.add([sample for sample in samples if sample.key[0] in portion])
        order.add([])
    at_once = PrefixOrder(samples, layout)
    assert order.num_tokens == at_once.num_tokens

    def parts_of(ordered: PrefixOrder) -> list[tuple[list[tuple[int, int]], int, float]]:
        parts = []
        for cut in ordered.cut(TILE // 2):
            parts.append(([ordered.samples[i].key for i in cut.members], cut.tokens, cut.scores))
        return parts

    assert parts_of(order) == parts_of(at_once)


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


def test_counts_of_a_micro_batch():
    sample = sized(5, 0)
    masked = changed(sized(4, 1), mask=np.array([True, False]))
    batch = MicroBatch((sample, masked))
    assert (batch.num_tokens, batch.num_trained) == (9, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rollout_logprobs": np.zeros(2, dtype=np.float32)},
            "3 completion ids, columns of .*'rollout_logprobs': 2",
        ),
        ({"mask": np.ones(5, dtype=np.bool_)}, "a mask of 5"),
        ({"prompt_ids": np.zeros(0, dtype=np.int32)}, "prompt is empty"),
        ({"advantage": float("nan")}, "must be finite"),
        ({"rollout_logprobs": np.array([0, np.nan, 0], dtype=np.float32)}, "logprobs must be finite"),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_never_built(change, message):
    with pytest.raises(ValueError, match=message):
        changed(sized(5, 0), **change)
