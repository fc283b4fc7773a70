"""The loss: hand-computed values, two independent implementations, and what each choice does to gradients.

The arithmetic is written beside each expectation. Logprobs are given as logs of round probabilities.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.config.trainer import AlgorithmConfig
from services.trainer.losses import (
    clipped_surrogate,
    denominator,
    importance_weights,
    policy_loss,
    token_weight,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(probabilities, rollout, advantages, weights=None, **algorithm):
    """`policy_loss` on probabilities; the logprobs that carry the gradient, and the terms."""
    logprobs_N = tensor(*probabilities).log().requires_grad_()
    weights_N = torch.ones(len(probabilities), dtype=torch.float64) if weights is None else tensor(*weights)
    terms = policy_loss(
        logprobs_N, tensor(*rollout).log(), tensor(*advantages), weights_N, AlgorithmConfig(**algorithm)
    )
    return logprobs_N, terms


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.2, 2.0, 2.4, 2.0),
        (1.5, 2.0, 2.56, 0.0),  # min(3.0, 1.28 * 2): clipped above
        (0.5, 2.0, 1.0, 2.0),  # min(1.0, 0.8 * 2): a good token that became unlikely keeps its gradient
        (0.5, -2.0, -1.6, 0.0),  # min(-1.0, 0.8 * -2): clipped below
        (1.5, -2.0, -3.0, -2.0),  # min(-3.0, 1.28 * -2): a bad token that became likely keeps its gradient
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, objective, slope):
    ratio_N = tensor(ratio).requires_grad_()
    value_N = clipped_surrogate(ratio_N, tensor(advantage), clip_low=0.2, clip_high=0.28)
    value_N.sum().backward()
    assert value_N.item() == pytest.approx(objective)
    assert ratio_N.grad.item() == pytest.approx(slope)


def test_importance_weights_are_truncated_from_above_only():
    weights_N = importance_weights(tensor(0.25, 1.0, 1.5, 8.0).log(), cap=2.0)
    np.testing.assert_allclose(weights_N, [0.25, 1.0, 1.5, 2.0])


def test_importance_weights_carry_no_gradient():
    log_ratio_N = tensor(0.1, 0.2).requires_grad_()
    assert not importance_weights(log_ratio_N, cap=2.0).requires_grad


def test_without_a_cap_there_is_no_correction():
    assert importance_weights(tensor(-3.0, 5.0), cap=None).tolist() == [1.0, 1.0]


def test_recompute_weighs_each_token_and_never_clips():
    # current / rollout = 0.5, 0.6 / 0.4 = 1.5, 0.9 / 0.1 = 9 -> 2; advantages 1, -2, 3; the ratio is 1
    logprobs_N, terms = loss_of([0.2, 0.6, 0.9], [0.4, 0.4, 0.1], [1.0, -2.0, 3.0])
    terms.loss.backward()
    # loss = -(0.5 * 1 + 1.5 * -2 + 2 * 3) = -3.5
    assert terms.loss.item() == pytest.approx(-3.5)
    # gradient = -weight * advantage: staleness never silences a token
    np.testing.assert_allclose(logprobs_N.grad, [-0.5, 3.0, -6.0])
    assert (terms.clipped_low.item(), terms.clipped_high.item(), terms.weights_capped.item()) == (0, 0, 1)
    assert (terms.weight_sum.item(), terms.weight_max.item()) == pytest.approx((4.0, 2.0))


def test_rollout_clips_the_ratio_and_ignores_the_cap():
    # ratios 0.5, 1.5, 9 with advantages -1, 1, -3
    logprobs_N, terms = loss_of(
        [0.2, 0.6, 0.9], [0.4, 0.4, 0.1], [-1.0, 1.0, -3.0], old_logprobs="rollout", importance_cap=2.0
    )
    terms.loss.backward()
    # min(-0.5, -0.8) = -0.8; min(1.5, 1.28) = 1.28; min(-27, -3.84) = -27; loss = 0.8 - 1.28 + 27
    assert terms.loss.item() == pytest.approx(26.52)
    # d(ratio) / d(logprob) = ratio: only the third keeps its gradient, 3 * 9
    np.testing.assert_allclose(logprobs_N.grad, [0.0, 0.0, 27.0])
    assert (terms.clipped_low.item(), terms.clipped_high.item(), terms.weights_capped.item()) == (1, 1, 0)
    assert (terms.weight_sum.item(), terms.weight_max.item()) == (3.0, 1.0)


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_on_policy_the_loss_is_the_plain_policy_gradient(old_logprobs):
    probabilities, advantages, weights = [0.2, 0.6, 0.9], [1.0, -2.0, 3.0], [0.5, 0.5, 1.0]
    logprobs_N, terms = loss_of(probabilities, probabilities, advantages, weights, old_logprobs=old_logprobs)
    terms.loss.backward()
    # the ratio is exactly 1, so these are equalities: -(0.5 * 1 - 0.5 * 2 + 1 * 3) = -2.5
    assert terms.loss.item() == -2.5
    assert logprobs_N.grad.tolist() == [-0.5, 1.0, -3.0]
    assert terms.weight_max.item() == 1.0
    assert terms.kl_sum.item() == terms.mismatch_sum.item() == terms.mismatch_max.item() == 0.0


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_kl_and_mismatch_compare_the_current_policy_with_the_rollout(old_logprobs):
    _, terms = loss_of([0.2, 0.6], [0.4, 0.4], [1.0, 1.0], old_logprobs=old_logprobs)
    # k3 = r - 1 - log r at r = 0.5 and r = 1.5
    k3 = (0.5 - 1 - math.log(0.5)) + (1.5 - 1 - math.log(1.5))
    assert terms.kl_sum.item() == pytest.approx(k3)
    # |log 0.5| = 0.693, |log 1.5| = 0.405
    assert terms.mismatch_sum.item() == pytest.approx(math.log(2) + math.log(1.5))
    assert terms.mismatch_max.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_absurd_ratios_stay_finite(old_logprobs):
    logprobs_N = tensor(-1.0, -500.0).float().requires_grad_()  # e^499 is infinite in float32
    rest = (tensor(-500.0, -1.0), tensor(-1.0, 1.0), tensor(1.0, 1.0))
    algorithm = AlgorithmConfig(old_logprobs=old_logprobs)
    terms = policy_loss(logprobs_N, *(values.float() for values in rest), algorithm)
    terms.loss.backward()
    assert all(torch.isfinite(getattr(terms, name)).all() for name in ("loss", "kl_sum", "weight_sum"))
    assert torch.isfinite(logprobs_N.grad).all()


def test_weights_and_denominators_of_the_three_normalisations():
    # two sequences with 2 and 4 trained tokens, completions of at most 10 tokens
    assert [token_weight("sequence", count) for count in (2, 4)] == [0.5, 0.25]
    assert [token_weight("token", count) for count in (2, 4)] == [1.0, 1.0]
    assert [token_weight("constant", count) for count in (2, 4)] == [1.0, 1.0]
    assert denominator("sequence", 2, 6, 10) == 2.0
    assert denominator("token", 2, 6, 10) == 6.0
    assert denominator("constant", 2, 6, 10) == 20.0


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
def test_denominators_add_up_over_parts(normalisation):
    parts = [(3, 17), (1, 0), (5, 40)]
    whole = denominator(normalisation, 9, 57, 32)
    assert sum(denominator(normalisation, *part, 32) for part in parts) == whole


def test_a_sequence_without_trained_tokens_counts_where_sequences_are_counted():
    assert token_weight("sequence", 0) == 1.0  # of no token
    assert denominator("sequence", 1, 0, 10) == 1.0
    assert denominator("token", 1, 0, 10) == 0.0
    assert denominator("constant", 1, 0, 10) == 10.0


# The same loss on rectangles [B, T], once by loops over numpy scalars and once by TRL.

MAX_COMPLETION = 8


def rectangle(seed: int) -> SimpleNamespace:
    """Random logprobs of 4 sequences; masks of 8, 5, 1 and 0 tokens."""
    rng = np.random.default_rng(seed)
    mask_BT = np.arange(MAX_COMPLETION)[None] < np.array([8, 5, 1, 0])[:, None]
    mask_BT[0, 3] = False
    return SimpleNamespace(
        current=rng.normal(-1.5, 0.6, mask_BT.shape).astype(np.float32),
        rollout=rng.normal(-1.5, 0.6, mask_BT.shape).astype(np.float32),
        advantages=rng.normal(size=4).astype(np.float32),
        mask=mask_BT,
    )


def our_loss(data: SimpleNamespace, algorithm: AlgorithmConfig) -> tuple[float, np.ndarray]:
    """Loss divided by its denominator, and its gradient [B, T]."""
    current_BT = torch.tensor(data.current, requires_grad=True)
    mask_BT = torch.tensor(data.mask)
    counts = data.mask.sum(1)
    weights = [token_weight(algorithm.normalisation, int(count)) for count in counts]
    terms = policy_loss(
        current_BT[mask_BT],
        torch.tensor(data.rollout)[mask_BT],
        torch.tensor(np.repeat(data.advantages, counts)),
        torch.tensor(np.repeat(weights, counts), dtype=torch.float32),
        algorithm,
    )
    size = denominator(algorithm.normalisation, len(counts), int(counts.sum()), MAX_COMPLETION)
    (terms.loss / size).backward()
    return terms.loss.item() / size, current_BT.grad.numpy()


def loop_loss(data: SimpleNamespace, algorithm: AlgorithmConfig) -> float:
    """The papers' formulas, one token at a time."""
    per_sequence, num_tokens = [], 0
    for b in range(len(data.advantages)):
        objectives = []
        for t in range(MAX_COMPLETION):
            if not data.mask[b, t]:
                continue
            ratio = math.exp(float(data.current[b, t]) - float(data.rollout[b, t]))
            advantage = float(data.advantages[b])
            if algorithm.old_logprobs == "recompute":
                objectives.append(min(ratio, algorithm.importance_cap) * advantage)
            else:
                clipped = max(min(ratio, 1 + algorithm.clip_high), 1 - algorithm.clip_low)
                objectives.append(min(ratio * advantage, clipped * advantage))
        num_tokens += len(objectives)
        per_sequence.append(objectives)
    if algorithm.normalisation == "sequence":
        means = [sum(objectives) / len(objectives) if objectives else 0.0 for objectives in per_sequence]
        return -sum(means) / len(means)
    total = sum(map(sum, per_sequence))
    return -total / (num_tokens if algorithm.normalisation == "token" else len(per_sequence) * MAX_COMPLETION)


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_formulas_written_as_loops(normalisation, old_logprobs, seed):
    algorithm = AlgorithmConfig(normalisation=normalisation, old_logprobs=old_logprobs)
    data = rectangle(seed)
    assert our_loss(data, algorithm)[0] == pytest.approx(loop_loss(data, algorithm), abs=1e-5)


@pytest.fixture(scope="module")
def trl_trainer_class():
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="the reference implementation")
    return module.GRPOTrainer


def trl_loss(trainer_class, data: SimpleNamespace, algorithm: AlgorithmConfig) -> tuple[float, np.ndarray]:
    """TRL's own `_compute_loss`, given our logprobs in place of a model's."""
    current_BT = torch.tensor(data.current, requires_grad=True)
    mask_BT = torch.tensor(data.mask).long()
    is_decoupled = algorithm.old_logprobs == "recompute"
    ratio_BT = torch.exp(torch.tensor(data.current - data.rollout)).clamp(max=algorithm.importance_cap)
    identity = SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
    )
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current_BT, torch.zeros_like(current_BT), None),
        loss_type={"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}[algorithm.normalisation],
        epsilon_low=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        use_vllm=is_decoupled,
        vllm_importance_sampling_correction=is_decoupled,
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        max_completion_length=MAX_COMPLETION,
        accelerator=identity,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        beta=0.0,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.ones(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "advantages": torch.tensor(data.advantages),
        "num_items_in_batch": mask_BT.sum(),
        "importance_sampling_ratio": ratio_BT,
    }
    if not is_decoupled:
        inputs["old_per_token_logps"] = torch.tensor(data.rollout)
    loss = trainer_class._compute_loss(stub, None, inputs)
    loss.backward()
    return loss.item(), current_BT.grad.numpy()


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_equals_trl_in_value_and_gradient(trl_trainer_class, normalisation, old_logprobs):
    algorithm = AlgorithmConfig(normalisation=normalisation, old_logprobs=old_logprobs)
    for seed in range(3):
        data = rectangle(seed)
        ours, our_gradient_BT = our_loss(data, algorithm)
        theirs, their_gradient_BT = trl_loss(trl_trainer_class, data, algorithm)
        assert ours == pytest.approx(theirs, abs=1e-5)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-5)
