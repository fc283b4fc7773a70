"""The losses against TRL's own `_compute_loss`, whose import takes longer than all other tests of losses."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import MAX_COMPLETION, our_loss, rectangle
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.mini_batch import top_entropy

ROLLOUT: dict[str, Any] = {"old_logprobs": "rollout"}
REFERENCE: dict[str, Any] = {"reference": {"model": "frozen"}}


@pytest.fixture(scope="module")
def trl_trainer_class():
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="the reference implementation")
    return module.GRPOTrainer


LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo", "sequence_sum": "luspo"}


def trl_loss(
    trainer_class: Any, data: Any, algorithm: AlgorithmConfig, has_proximal: bool, corrects_kl: bool
) -> tuple[float, np.ndarray, dict[str, float]]:
    """TRL's own `_compute_loss`, given our logprobs in place of a model's; its loss, gradient and metrics."""
    current_BT = torch.tensor(data.current, requires_grad=True)
    mask_BT = torch.tensor(data.mask).long()
    is_decoupled = algorithm.old_logprobs == "recompute"
    has_kl = algorithm.kl.place == "loss"
    entropies_BT = torch.tensor(data.entropies)
    loss_type = LOSS_TYPES[algorithm.normalisation]
    identity = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
    )
    args = SimpleNamespace(
        delta=algorithm.dual_clip_bound, steps_per_generation=1, use_bias_correction_kl=corrects_kl,
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vespo_k_pos=algorithm.vespo.positive[0], vespo_lambda_pos=algorithm.vespo.positive[1],
        vespo_k_neg=algorithm.vespo.negative[0], vespo_lambda_neg=algorithm.vespo.negative[1],
    )  # fmt: skip
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current_BT, entropies_BT, None), args=args,
        loss_type=algorithm.loss if algorithm.loss in ("cispo", "sapo", "vespo") else loss_type,
        epsilon_low=algorithm.clip_low, epsilon_high=algorithm.clip_high + (algorithm.loss == "cispo"),
        use_vllm=is_decoupled, vllm_importance_sampling_correction=is_decoupled,
        max_completion_length=MAX_COMPLETION, accelerator=identity, model=SimpleNamespace(training=True),
        importance_sampling_level="sequence" if algorithm.loss == "gspo" else "token",
        current_gradient_accumulation_steps=1, off_policy_mask_threshold=algorithm.off_policy_threshold,
        get_gamma_weights=trainer_class.get_gamma_weights, top_entropy_quantile=1.0,
        get_off_policy_mask=trainer_class.get_off_policy_mask, aux_loss_enabled=False,
        beta=algorithm.kl.coefficient if has_kl else 0.0, use_adaptive_entropy=False,
        _entropy_bonus_enabled=algorithm.entropy_coefficient > 0, _metrics={"train": defaultdict(list)},
        entropy_coef=algorithm.entropy_coefficient,
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.ones(4, 1, dtype=torch.long), "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask_BT), "completion_mask": mask_BT,
        "advantages": torch.tensor(data.advantages), "num_items_in_batch": mask_BT.sum(),
        "importance_sampling_ratio": trl_importance(data, algorithm, has_proximal) if is_decoupled else None,
        "ref_per_token_logps": torch.tensor(data.reference),
        "sampling_per_token_logps": torch.tensor(data.rollout),
    }  # fmt: skip
    if not is_decoupled:
        inputs["old_per_token_logps"] = torch.tensor(data.rollout)
    elif has_proximal:
        inputs["old_per_token_logps"] = torch.tensor(data.proximal)
    loss = trainer_class._compute_loss(stub, None, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in stub._metrics["train"].items()}
    return loss.item(), current_BT.grad.numpy(), metrics


def trl_importance(data: SimpleNamespace, algorithm: AlgorithmConfig, has_proximal: bool) -> torch.Tensor:
    """What TRL 1.16 computes in `_generate_and_score_completions`, which needs an engine."""
    importance = algorithm.importance
    mask_BT = torch.tensor(data.mask)
    base = data.proximal if has_proximal else data.current
    difference_BT = (torch.tensor(base) - torch.tensor(data.rollout)) * mask_BT
    if importance.level == "sequence":
        difference_BT = difference_BT.sum(-1, keepdim=True)
    ratio = torch.exp(difference_BT)
    if importance.mode == "mask":
        return ratio.masked_fill((ratio < importance.low) | (ratio > importance.high), 0.0)
    return ratio.clamp(min=importance.low, max=importance.high)


TRL_CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo rollout": ROLLOUT,
    "delta": {"dual_clip": 1.6, **ROLLOUT},
    "sequence_truncate": {"importance": {"level": "sequence", "low": 0.5, "high": 3.0}},
    "sequence_mask": {"importance": {"mode": "mask", "level": "sequence", "low": 0.3, "high": 3.0}},
    "token_mask": {"importance": {"mode": "mask", "low": 0.5, "high": 2.0}},
    "off_policy_mask": {"off_policy_threshold": 0.05},
    "beta": {"kl": {"place": "loss", "estimator": "k3", "coefficient": 0.2}, **REFERENCE},
}


def assert_same(
    trainer_class: Any, algorithm: AlgorithmConfig, has_proximal: bool = False, corrects_kl: bool = False
) -> None:
    for seed in range(3):
        data = rectangle(seed)
        ours, our_gradient_BT, _ = our_loss(data, algorithm, has_proximal)
        theirs, their_gradient_BT, _ = trl_loss(trainer_class, data, algorithm, has_proximal, corrects_kl)
        assert ours == pytest.approx(theirs, abs=1e-5)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-5)


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", TRL_CASES)
def test_equals_trl_in_value_and_gradient(trl_trainer_class, case, has_proximal, normalisation):
    algorithm = AlgorithmConfig(normalisation=normalisation, **TRL_CASES[case])
    assert_same(trl_trainer_class, algorithm, has_proximal)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "normalisation": "sequence", **ROLLOUT},
        {"loss": "gspo", "normalisation": "sequence", "clip_low": 0.01, "clip_high": 0.02, **ROLLOUT},
        {"loss": "cispo", "normalisation": "token", "clip_low": 1.0, "clip_high": 0.5, **ROLLOUT},
        {"loss": "sapo", "normalisation": "sequence", **ROLLOUT},
        {"entropy_coefficient": 0.3, "normalisation": "token"},
        {"loss": "vespo", "normalisation": "token", **ROLLOUT},
        {"loss": "gspo", "normalisation": "sequence_sum", **ROLLOUT},
    ],
    ids=["gspo", "gspo narrow", "cispo", "sapo", "entropy", "vespo", "luspo"],
)
def test_equals_trl_with_its_normalisation_of_this_loss(trl_trainer_class, algorithm):
    assert_same(trl_trainer_class, AlgorithmConfig(**algorithm))


def test_counts_what_trl_counts_as_clipped(trl_trainer_class):
    algorithm = AlgorithmConfig(**ROLLOUT, **REFERENCE, kl={"place": "loss", "coefficient": 0.1})
    data = rectangle(0)
    _, _, terms = our_loss(data, algorithm)
    _, _, metrics = trl_loss(trl_trainer_class, data, algorithm, has_proximal=False, corrects_kl=False)
    num_tokens = data.mask.sum()
    assert terms.sums["clipped_low"].item() / num_tokens == pytest.approx(metrics["clip_ratio/low_mean"])
    assert terms.sums["clipped_high"].item() / num_tokens == pytest.approx(metrics["clip_ratio/high_mean"])
    assert terms.sums["kl_sum"].item() / num_tokens == pytest.approx(metrics["kl"], abs=1e-5)
    assert terms.sums["entropy_sum"].item() / num_tokens == pytest.approx(metrics["entropy"], abs=1e-5)


@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
def test_equals_trls_corrected_kl(trl_trainer_class, has_proximal):
    """TRL's default since 1.16; `use_bias_correction_kl=False` is our k3."""
    kl = {"place": "loss", "estimator": "corrected_k3", "coefficient": 0.2, "bound": None}
    assert_same(trl_trainer_class, AlgorithmConfig(kl=kl, **REFERENCE), has_proximal, corrects_kl=True)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_chooses_the_tokens_that_trl_chooses_by_entropy(trl_trainer_class, share):
    alone = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    stub = SimpleNamespace(accelerator=alone)
    for seed in range(3):
        data = rectangle(seed)
        entropies_BT = torch.tensor(data.entropies)
        mask_BT = torch.tensor(data.mask)
        theirs_BT = trl_trainer_class.get_high_entropy_mask(stub, entropies_BT, mask_BT, 1 - share)
        ours_N = top_entropy(data.entropies[data.mask].astype(np.float64), share)
        np.testing.assert_array_equal(ours_N, theirs_BT[mask_BT].numpy())
