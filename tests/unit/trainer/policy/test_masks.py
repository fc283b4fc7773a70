"""Sampling masks: what the engine kept is what logprobs are taken over, in the engine and in training."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.architectures import make_model
from tests.support.models import (
    attend_as_varlen,
    gradients_of,
    make_policy,
    make_relatives,
    one_batch,
    run_config,
    tiny_model,
    with_masks,
)
from tests.support.samples import changed, sample_of
from tests.support.sessions import session_samples
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Choices, SamplingParams
from tidemill.services.rollout.engines.engine import GenerationRequest
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.trainer.groups.choices import missing_mask
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import NO_CHOICES, GroupFilter
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy import kept_ids as kept_ids_module
from tidemill.services.trainer.policy.head import Scaling, score_hidden
from tidemill.services.trainer.policy.kept_ids import KeptLogits, kept_log_mass, split_by_width
from tidemill.services.trainer.policy.transformers_policy import by_group

PLAIN_LOSS = {"normalisation": "token", "importance": {"mode": "off"}}
"""Its gradient is that of -(advantage * logprob), summed over the trained tokens."""


def dense_logprobs(logits_NV: Tensor, targets_N: Tensor, kept: Rows | None) -> Tensor:
    """By a mask over the whole vocabulary, token by token."""
    assert kept is None or kept.offsets is not None
    filled = []
    for i, logits_V in enumerate(logits_NV):
        kept_ids = [] if kept is None else kept.values[kept.offsets[i] : kept.offsets[i + 1]].tolist()
        away = torch.full_like(logits_V, -torch.inf)
        away[kept_ids if kept_ids else slice(None)] = 0.0
        filled.append(torch.log_softmax(logits_V + away, -1)[targets_N[i]])
    return torch.stack(filled)


class OwnLinear(nn.Linear):
    """A head that is scored by its forward, as one with adapters."""


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(0.5, 30.0)])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize(
    ("kind", "chunk"), [(nn.Linear, 7), (nn.Linear, 99), (OwnLinear, 7), (OwnLinear, 99)]
)
@pytest.mark.parametrize("padded_elements", [1 << 22, 20, 1])
def test_the_head_is_a_dense_mask_in_value_and_gradient(
    kind, chunk, entropies, scaling, padded_elements, monkeypatch
):
    """Also where the rows of a chunk are padded apart, some of them or each by itself."""
    monkeypatch.setattr(kept_ids_module, "PADDED_ELEMENTS", padded_elements)
    monkeypatch.setattr(kept_ids_module, "PADDED_SHARE", 1 << 30)
    rng = np.random.default_rng(0)
    vocabulary = 37
    head = kind(8, vocabulary).double()
    hidden_NH = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    targets_N = torch.from_numpy(rng.integers(0, vocabulary, 50))
    sizes = rng.integers(0, 9, 50)
    rows = [sorted({target, *rng.integers(0, vocabulary, n).tolist()}) if n else []
            for target, n in zip(targets_N.tolist(), sizes, strict=True)]  # fmt: skip
    of_logprobs_N = torch.randn(50).double()
    of_entropies_N = entropies * torch.randn(50).double()

    def gradients(logprobs_N, entropies_N):
        loss = logprobs_N @ of_logprobs_N + (entropies_N @ of_entropies_N if entropies else 0.0)
        return list(torch.autograd.grad(loss, [hidden_NH, *head.parameters()]))

    kept = Rows.of_lists(rows)
    options = 0.7, chunk * vocabulary, entropies, scaling, kept
    *scored, log_mass_N = score_hidden(hidden_NH, head, targets_N, *options)
    logits_NV = scaling.of(head(hidden_NH)) / 0.7
    whole_NV = torch.log_softmax(logits_NV, -1)
    expected = dense_logprobs(logits_NV, targets_N, kept), -(whole_NV.exp() * whole_NV).sum(-1)
    for mine, expected_value in zip(
        [*scored, *gradients(*scored)], [*expected, *gradients(*expected)], strict=True
    ):
        torch.testing.assert_close(mine, expected_value, rtol=0.0, atol=1e-13)
    logprobs_N, _, log_mass_N = score_hidden(hidden_NH, head, targets_N, *options)
    whole_N = whole_NV.gather(-1, targets_N[:, None])[:, 0]
    torch.testing.assert_close(logprobs_N + log_mass_N, whole_N, rtol=0.0, atol=1e-13)
    # All of the head's outputs together have the gradients of the dense ones.
    of_whole_N = torch.randn(50).double()
    mine = torch.autograd.grad(
        (logprobs_N + log_mass_N) @ of_whole_N + log_mass_N @ of_logprobs_N, [hidden_NH, *head.parameters()]
    )
    logits_NV = scaling.of(head(hidden_NH)) / 0.7
    whole_N = torch.log_softmax(logits_NV, -1).gather(-1, targets_N[:, None])[:, 0]
    mass_N = whole_N - dense_logprobs(logits_NV, targets_N, kept)
    dense = torch.autograd.grad(
        whole_N @ of_whole_N + mass_N @ of_logprobs_N, [hidden_NH, *head.parameters()]
    )
    for ours, expected_value in zip(mine, dense, strict=True):
        torch.testing.assert_close(ours, expected_value, rtol=0.0, atol=1e-13)


def test_one_wide_row_does_not_widen_the_others():
    """Of 8 tokens one kept 100 ids and the others 2: 114 elements in place of 800."""
    counts = np.array([2, 2, 2, 100, 2, 2, 2, 2])
    parts = list(split_by_width(counts, most=50))
    assert [rows.tolist() for rows in parts] == [[3], [0, 1, 2, 4, 5, 6, 7]]
    assert [rows.tolist() for rows in split_by_width(np.array([0, 9, 5, 4, 1, 9]), most=20)] == [
        [1, 5], [2, 3], [4, 0],
    ]  # fmt: skip
    kept = Rows.of_lists([range(count) for count in counts])
    values_CV = torch.randn(8, 200_000)
    assert [block.ids_RK.shape for block in KeptLogits.of(values_CV, kept)] == [(8, 100)], "small enough"
    wide = Rows.of_lists([range(140_000) if count > 2 else range(2) for count in counts])
    values_CV = torch.randn(40, 150_000)
    wide = Rows.joined([wide] * 5)
    assert [block.ids_RK.shape for block in KeptLogits.of(values_CV, wide)] == [(5, 140_000), (35, 2)]


def test_rows_that_are_padded_together_have_the_same_bits_as_ever():
    values_CV = torch.randn(16, 300)
    rng = np.random.default_rng(0)
    kept = Rows.of_lists([rng.permutation(300)[: rng.integers(0, 40)] for _ in range(16)])
    width = int(np.diff(kept.offsets).max())
    padded_CK = torch.full((16, width), -torch.inf)
    for row in range(16):
        ids = kept.values[kept.offsets[row] : kept.offsets[row + 1]].astype(np.int64)
        padded_CK[row, : len(ids)] = values_CV[row, torch.from_numpy(ids)]
        if not len(ids):
            padded_CK[row, 0] = 0.0
    assert torch.equal(kept_log_mass(values_CV, kept), padded_CK.logsumexp(-1))


def reference(policy: Any, samples: Sequence[Sample], temperature: float) -> tuple[list[Tensor], Tensor]:
    """Of each sample's completion tokens the logprobs, a row of the model for each segment; and the gradient
    of `PLAIN_LOSS`."""
    logprobs = []
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logits = []
        start = 0
        for prompt_ids, num_completion in sample.segments:
            ids = np.concatenate([prompt_ids, sample.completion_ids[start : start + num_completion]])
            whole_TV = policy._model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            logits.append(whole_TV[len(prompt_ids) - 1 : -1] / temperature)
            start += num_completion
        targets_T = torch.from_numpy(sample.completion_ids.astype(np.int64))
        logprobs.append(dense_logprobs(torch.cat(logits), targets_T, sample.kept))
        loss = loss - sample.advantage * logprobs[-1][torch.from_numpy(sample.mask)].sum()
    weights = [weight for _, weight in policy._parameters]
    return [logprobs_T.detach() for logprobs_T in logprobs], torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, weights)]
    )


@pytest.mark.parametrize("layout", ["tree", "padded", "varlen"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 2}}])
def test_training_is_that_of_a_dense_mask_in_every_layout(layout, options):
    model = make_model("GPTNeoX")  # its norms are float64, as its weights are
    if layout == "varlen":
        attend_as_varlen(model)
    policy = make_policy(torch.float64, model=model, temperature=1.6, algorithm=PLAIN_LOSS, **options)
    policy.layout = layout
    if options.get("lora"):  # adapters begin as nothing
        with torch.no_grad():
            for _, weight in policy._parameters:
                weight.add_(0.1 * torch.randn_like(weight))
    samples = with_masks([*make_relatives(12), *session_samples(4)])
    logprobs, gradient = reference(policy, samples, 1.6)
    for mine, expected in zip(policy._score_all([samples], policy.scorer, 1.6), logprobs, strict=True):
        np.testing.assert_allclose(mine["logprobs"], expected.numpy(), rtol=0.0, atol=1e-12)
    policy.accumulate(one_batch(samples))
    assert float((gradients_of(policy) - gradient).norm() / gradient.norm()) < 1e-12


def test_samples_share_positions_whose_masks_differ():
    """A mask belongs to a prediction, and not to the position that makes it."""
    policy = make_policy(torch.float64, model=make_model("GPTNeoX"), algorithm=PLAIN_LOSS)
    sample = make_relatives(1)[0]
    ids = np.arange(3, 15, dtype=np.int32)
    first = changed(sample, prompt_ids=ids, completion_ids=ids, rollout_logprobs=np.zeros(12, np.float32),
                    mask=np.ones(12, np.bool_))  # fmt: skip
    alike = []
    for i, more in enumerate([(), (4,), (5, 20, 21)]):
        kept = Rows.of_lists([sorted({token, *more}) for token in ids.tolist()])
        alike.append(changed(first, key=(0, i), kept=kept))
    samples = [*alike, changed(first, key=(0, 3))]
    logprobs, gradient = reference(policy, samples, 1.0)
    assert policy.layout == "tree_or_padded" and not logprobs[0].any(), "sampled from one id alone"
    metrics = policy.accumulate(one_batch(samples))
    assert (metrics.positions, metrics.row_tokens) == (23, 4 * 23)
    assert float((gradients_of(policy) - gradient).norm() / gradient.norm()) < 1e-12


def test_a_reference_is_no_engine_and_scores_over_all_ids():
    algorithm = {"kl": {"place": "loss"}, "reference": {"model": "frozen"}}
    policy = make_policy(torch.float64, algorithm=algorithm, passes=2)
    samples = with_masks(make_relatives(8))
    bare = [changed(sample, kept=None) for sample in samples]
    masked = policy.precompute(samples)
    without = policy.precompute(bare)
    for sample, with_mask, without_mask in zip(samples, masked, without, strict=True):
        np.testing.assert_array_equal(with_mask["reference_logprobs"], without_mask["reference_logprobs"])
        is_same = np.array_equal(with_mask["proximal_logprobs"], without_mask["proximal_logprobs"])
        assert is_same == (sample.kept is None)


FILTERS = [
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.05, "temperature": 0.5},
]


@pytest.mark.parametrize("filters", FILTERS)
async def test_the_engines_logprobs_are_the_trainers(tmp_path, filters):
    """10,000 tokens of each filter. The small vocabulary is one of 200 words here, so that each filter
    leaves ids out."""
    folder = tiny_model(tmp_path, vocab_size=200, initializer_range=0.2, eos_token_id=199)
    config = run_config(folder, rollout={"engine": "transformers", "max_num_seqs": 256})
    engine = TransformersEngine(config)
    await engine.start()
    engine._model.double()
    sampling = SamplingParams(max_tokens=60, **filters)
    prompts = []
    requests = []
    for i in range(256):
        prompt_ids = [3 + (i * 5 + j * 7) % 190 for j in range(1 + i % 9)]
        prompts.append(prompt_ids)
        requests.append(GenerationRequest(f"r{i}", prompt_ids, sampling))
    generations = await asyncio.gather(*map(engine.generate, requests))
    samples = [_as_sample(i, prompts[i], generation) for i, generation in enumerate(generations)]
    logprobs = [generation.logprobs for generation in generations]
    assert sum(map(len, logprobs)) > 10_000
    model = engine._model.requires_grad_(True)
    policy = make_policy(torch.float64, model=model, temperature=sampling.temperature)
    await engine.close()
    scored = policy._score_all(by_group(samples), policy.scorer, sampling.temperature)
    gaps = [np.abs(mine["logprobs"] - theirs).max() for mine, theirs in zip(scored, logprobs, strict=True)]
    assert max(gaps) <= 1e-12
    counts = np.concatenate([np.diff(sample.kept.offsets) for sample in samples])
    assert 1 <= counts.min() <= counts.max() < 200, "each filter takes some"
    bare = [changed(sample, kept=None) for sample in samples]
    without = policy._score_all(by_group(bare), policy.scorer, sampling.temperature)
    unmasked = np.concatenate([columns["logprobs"] for columns in without])
    assert np.mean(np.concatenate(logprobs) - unmasked) > 0.01


def _as_sample(number: int, prompt_ids: list[int], generation: Any) -> Sample:
    kept = generation.choices["kept"]
    return sample_of(divmod(number, 4), prompt_ids, generation.token_ids, generation.logprobs, kept=kept)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[0, 9], [1], [2]], ""),
        ([[0, 9], [], [2]], "token 1"),
        ([[0, 9], [1], [9]], "token 2"),
        (None, "no sampling masks"),
    ],
)
def test_a_sampled_token_without_its_mask_is_found(rows, problem):
    choices = Choices(rows={"kept": Rows.of_lists(rows)}) if rows else None
    assert problem in missing_mask(make_trajectory(choices=choices))
    assert bool(missing_mask(make_trajectory(choices=choices))) == bool(problem)


def test_a_group_without_any_masks_is_refused_unless_it_was_trained_so():
    """What a resumed run trains again kept the sampling of its time."""
    samples = {i: make_trajectory(0, i, group_size=2) for i in range(2)}
    group = Group(0, 0, samples, {i: make_score(0, i, float(i)) for i in range(2)})
    judge = GroupFilter(trainer_config(rollout__sampling={"top_p": 0.9}))
    refusal = judge.apply(group, 0)
    assert refusal is not None and refusal.reason == NO_CHOICES
    assert judge.select(group) is None and len(group.samples) == 2
    assert GroupFilter(trainer_config()).apply(group, 0) is None


def test_tokens_of_the_environment_need_no_mask():
    choices = Choices(rows={"kept": Rows.of_lists([[0], [], [2]])})
    assert missing_mask(make_trajectory(choices=choices, loss_mask=np.array([1, 0, 1], np.bool_))) == ""
