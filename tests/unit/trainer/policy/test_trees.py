"""What rows begin with alike is computed once, and no number differs from that of a row for each sample."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.architectures import make_model
from tests.support.models import (
    accumulate_all,
    gradients_of,
    logprobs_of,
    make_policy,
    make_relatives,
    make_samples,
    one_batch,
    with_masks,
)
from tests.support.samples import changed, sample_of
from tests.support.sessions import session_samples
from tidemill.services.trainer.groups import trie as tries
from tidemill.services.trainer.groups.bins import split_samples
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.groups.trie import NodeCount, Trie, common_lengths, in_order, num_common
from tidemill.services.trainer.policy import trees
from tidemill.services.trainer.policy.forward import TokenScorer, pick_layout
from tidemill.services.trainer.policy.packing import make_rows, plan_tiles
from tidemill.services.trainer.policy.tile import lay_out
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.policy.trees import Tree, rows_at

FEW = st.integers(1, 3)
"""Ids so few that rows often begin alike."""


def array(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


@given(st.lists(st.lists(FEW, min_size=1, max_size=12), min_size=1, max_size=12), st.sampled_from([1, 4]))
def test_each_sequence_is_on_the_path_of_its_last_node(rows, shortest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tries, "SHORTEST", shortest)
        trie = Trie()
        count = NodeCount()
        ordered = sorted(map(array, rows), key=in_order)
        commons = common_lengths(ordered)
        assert commons == [0, *(num_common(*pair) for pair in pairwise(ordered))]
        places = []
        for ids, common in zip(ordered, commons, strict=True):
            expected = count.size + len(ids) - count.shared(common)
            count.add(len(ids), common)
            places.append(trie.add(len(ids), common))
            assert trie.size == count.size == expected, "what would be shared is shared"
        row = np.zeros(trie.size, dtype=np.int32)
        for ids, its_places in zip(ordered, places, strict=True):
            row[its_places] = ids
        assert all(
            np.array_equal(row[its_places], ids) for ids, its_places in zip(ordered, places, strict=True)
        )
    covered = sorted(covered_place for node in trie.nodes for covered_place in node.places.tolist())
    assert covered == list(range(trie.size))
    if shortest == 1:
        different = {tuple(ids[: i + 1]) for ids in rows for i in range(len(ids))}
        assert trie.size == len(different), "each beginning is there once"


def test_a_common_beginning_is_a_node_where_it_is_long_enough():
    trie = Trie()
    count = NodeCount()
    common = list(range(10, 20))
    rows = [
        array(ids)
        for ids in (
            [*common, 1, 2],
            [*common, 3],
            [*common, 3, *range(30, 42)],
            [*common, 3, *range(30, 38), 50],
        )
    ]
    for ids, length in zip(rows, common_lengths(rows), strict=True):
        trie.add(len(ids), length)
        count.add(len(ids), length)
    shape = sorted((node.start, node.end, node.above and node.above.end) for node in trie.nodes)
    assert shape == [(0, 10, None), (10, 11, 10), (10, 12, 10), (11, 19, 11), (19, 20, 19), (19, 23, 19)]
    scores = sum((node.end - node.start) * (node.end if node.above else node.end / 2) for node in trie.nodes)
    assert (count.size, count.num_scores) == (trie.size, scores)
    assert count.shared(7) == 0, "seven tokens are not worth a node"


@st.composite
def families(draw: Any) -> list[Sample]:
    """Samples of up to six generations: each continues or repeats the beginning of an earlier one, or begins
    anew; completions from none of the others' tokens to all."""
    samples: list[Sample] = []
    for plain in make_samples(draw(st.integers(2, 9)), seed=draw(st.integers(0, 99))):
        prompt_ids = plain.prompt_ids
        ids = plain.completion_ids
        if samples and draw(st.booleans()):
            earlier = samples[draw(st.integers(0, len(samples) - 1))]
            prompt_ids = earlier.prompt_ids
            kept = earlier.completion_ids[: draw(st.integers(0, len(earlier.completion_ids)))]
            if draw(st.booleans()) and len(prompt_ids) < 60:  # a later turn: what was said is prompt now
                prompt_ids = np.concatenate([prompt_ids, kept])
            else:
                ids = np.concatenate([kept, ids])[: len(ids)]
        samples.append(changed(plain, prompt_ids=prompt_ids, completion_ids=ids))
    return with_masks(samples)


def single_and_tree(**trainer: Any) -> tuple[TransformersPolicy, TransformersPolicy]:
    """Two policies alike: the first has a row for each sample, the second has trees. The model's norms are
    float64, as its weights are."""
    single = make_policy(torch.float64, model=make_model("GPTNeoX"), **trainer)
    tree = make_policy(torch.float64, model=make_model("GPTNeoX"), **trainer)
    single.layout = "padded"
    single._tile_tokens = 1
    tree.layout = "tree"
    return single, tree


def gap_to_single_rows(
    samples: Sequence[Sample], max_tokens: int, single: TransformersPolicy, tree: TransformersPolicy
) -> float:
    """The relative difference of gradients between trees and a row for each sample; loss and logprobs are
    compared on the way."""
    tree._tile_tokens = max_tokens
    for policy in (single, tree):
        policy.zero()
    results = [accumulate_all(policy, [one_batch(samples)]) for policy in (single, tree)]
    assert results[1].loss_sum == pytest.approx(results[0].loss_sum, rel=1e-12, abs=1e-12)
    for expected_logprobs, logprobs in zip(
        logprobs_of(single, samples), logprobs_of(tree, samples), strict=True
    ):
        np.testing.assert_allclose(expected_logprobs, logprobs, rtol=1e-6)
    expected = gradients_of(single)
    gradient = gradients_of(tree)
    return float((gradient - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def plain_policies() -> tuple[TransformersPolicy, TransformersPolicy]:
    return single_and_tree()


@settings(max_examples=40, deadline=None)
@given(families(), st.sampled_from([8, 40, 1000]), st.sampled_from([1, 8]))
def test_gradients_and_logprobs_are_those_of_a_row_for_each_sample(
    plain_policies, samples, max_tokens, shortest
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tries, "SHORTEST", shortest)
        assert gap_to_single_rows(samples, max_tokens, *plain_policies) < 1e-12


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"normalisation": name} for name in ("token", "sequence", "constant", "sequence_sum")),
        {"preset": "gspo", "clip_low": 0.5, "clip_high": 5.0},
        {"loss": "gmpo", "old_logprobs": "rollout", "normalisation": "sequence_sum"},
        {"importance": {"mode": "truncate", "level": "geometric", "high": 2.0}},
        {"entropy_coefficient": 0.1},
    ],
)
@pytest.mark.parametrize("fields", [{}, {"gradient_checkpointing": True}])
def test_no_loss_and_no_session_sees_a_difference(algorithm, fields):
    samples = with_masks([*session_samples(6), *make_relatives(10)])
    policies = single_and_tree(algorithm=algorithm, **fields)
    assert gap_to_single_rows(samples, 60, *policies) < 1e-12


def test_a_gradient_that_meets_in_one_place_has_the_same_bits_each_time():
    """Broken, two threads add in the order of their arrival: replays would not give the recorded weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values = torch.randn(50, 64, requires_grad=True)
        places = torch.randint(0, 50, (40, 100))
        gradient = torch.randn(40, 100, 64)
        gradients = [torch.autograd.grad(rows_at(values, places), values, gradient)[0] for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    first = gradients[0]
    assert all(torch.equal(first, again) for again in gradients)
    expected = torch.zeros(50, 64).index_add_(0, places.flatten(), gradient.flatten(0, 1))
    torch.testing.assert_close(first, expected)
    assert torch.equal(rows_at(values, places), values[places])


def test_a_tile_grows_for_what_is_mostly_there_already():
    prompt = np.arange(100, dtype=np.int32)
    samples = [changed(sample, key=(0, i), prompt_ids=prompt) for i, sample in enumerate(make_samples(12))]
    rows = make_rows(samples, [sample.mask for sample in samples])
    (tile,) = map(lay_out, plan_tiles(rows, "tree", 110, most_shared=4096))
    assert tile.ids_BT.numel() <= 100 + sum(len(row) - 100 for row in rows)
    assert len(plan_tiles(rows, "tree", 110)) > 2
    few = plan_tiles(make_rows(make_samples(12), [s.mask for s in make_samples(12)]), "tree_or_padded", 60)
    assert any(tile.layout == "padded" for tile in few), "nothing in common: padded rows"


def test_a_window_that_only_the_mask_knows_gives_no_tree():
    """Longer than what is tried, it would show in no number; given to attention, it is kept."""
    sizes = {"num_local_experts": 2, "sliding_window": 40, "max_position_embeddings": 256}
    hidden = make_model("Phimoe", **sizes)
    assert pick_layout(hidden, TokenScorer(hidden, torch.float32), True, 64) == "padded"
    passed_on = make_model("Mistral", sliding_window=40)
    assert pick_layout(passed_on, TokenScorer(passed_on, torch.float32), True, 64) == "tree_or_padded"


@pytest.mark.parametrize(("groups", "size"), [(3, 2), (12, 8), (9, 8), (1, 4)])
def test_ranks_have_like_loads_and_common_beginnings_together(groups, size):
    completion_ids = np.arange(100, dtype=np.int32)
    samples = [
        sample_of((group, i), 1000 * group + np.arange(200), completion_ids + 10_000 * (group * 8 + i + 1))
        for group in range(groups)
        for i in range(8)
    ]
    shares = split_samples(samples, size, 100_000)
    assert sorted(i for share in shares for i in share) == list(range(len(samples)))
    loads = []
    for share in shares:
        groups_of_share = {samples[i].key[0] for i in share}
        loads.append(200 * len(groups_of_share) + 100 * len(share))
    alone = -(-8 * groups // size) * 300
    assert max(loads) < 0.8 * alone, "less than with a row for each"
    row_loads = [len(share) for share in split_samples(samples, size, 100_000, "varlen")]
    assert max(row_loads) - min(row_loads) <= 1


@pytest.mark.parametrize("run_tokens", [1, 3, 8])
def test_a_window_over_many_tokens_is_computed_in_runs(run_tokens, monkeypatch):
    """The same numbers as with one mask over all keys, and as in padded rows."""
    monkeypatch.setattr(trees, "LEAST_RUN", run_tokens)
    samples = make_relatives(12)
    numbers = {}
    for name, most in (("tree", 1 << 22), ("runs", 0), ("padded", 0)):
        monkeypatch.setattr(trees, "MOST_SCORES", most)
        policy = make_policy(torch.float64, model=make_model("Gemma3Text"))
        policy.layout = "padded" if name == "padded" else "tree"
        logprobs = np.concatenate(logprobs_of(policy, samples))
        policy.accumulate(one_batch(samples))
        numbers[name] = logprobs, gradients_of(policy)
    for name in ("tree", "padded"):
        np.testing.assert_allclose(numbers["runs"][0], numbers[name][0], atol=1e-6)
        gap = (numbers["runs"][1] - numbers[name][1]).norm() / numbers[name][1].norm()
        assert gap.item() < 1e-6


def test_the_masks_of_a_long_row_grow_with_its_window():
    """16,384 tokens with a window of 512: 32 runs of 512 queries, each with at most 1,023 keys."""
    trie = Trie()
    trie.add(16_384, 0)
    tree = Tree(trie.nodes)
    buckets, back_T = tree.buckets(torch.device("cpu"), 512, torch.float32)
    assert sum(0 if bucket.mask is None else bucket.mask.numel() for bucket in buckets) <= 32 * 512 * 1023
    seen = torch.cat([bucket.queries_nQ.flatten() for bucket in buckets])[back_T]
    assert torch.equal(seen, torch.arange(16_384)), "each token once, in order"
