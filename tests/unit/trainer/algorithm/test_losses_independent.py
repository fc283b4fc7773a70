"""The losses against their papers' formulas, written again in float64: the same values and gradients. Those
that TRL has too are held against TRL itself (tests/integration/trainer/test_losses_of_trl.py).

`of` is a sequence: logprobs `now` (with gradient), `old`, `proximal`, `rollout`, `reference` of its tokens.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import (
    MAX_COMPLETION,
    check_formula,
    our_loss,
    probable_rectangle,
    rectangle,
    written_out,
)
from tidemill.common.config.algorithm import AlgorithmConfig

ROLLOUT: dict[str, Any] = {"old_logprobs": "rollout"}
Formula = Callable[[SimpleNamespace], torch.Tensor]


def clip(ratio: torch.Tensor, of: SimpleNamespace, low: float, high: float, dual: float) -> torch.Tensor:
    objective = torch.minimum(ratio * of.advantage, ratio.clamp(1 - low, 1 + high) * of.advantage)
    return -(objective.clamp(min=dual * of.advantage) if of.advantage < 0 else objective)


def gspo(of: SimpleNamespace, low: float = 0.2, high: float = 0.28, dual: float = 3.0) -> torch.Tensor:
    return clip((of.now - of.old).mean().exp(), of, low, high, dual).repeat(len(of.now))


def dppo(of: SimpleNamespace, kind: str, low: float, high: float, most: float = math.inf) -> torch.Tensor:
    losses = []
    for now, old in zip(of.now, of.old, strict=True):
        p, q = math.exp(now.item()), math.exp(old.item())
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if kind == "kl" else abs(p - q)
        is_out = far > high and p > q if of.advantage > 0 else far > low and p < q
        losses.append(0.0 * now if is_out else -of.advantage * min(p / q, most) * (1 + now - now.detach()))
    return torch.stack(losses)


def gmpo(of: SimpleNamespace, low: float, high: float) -> torch.Tensor:
    """A product of ratios to the power 1 / T, as the paper writes it."""
    product = torch.ones((), dtype=torch.float64)
    for now, old in zip(of.now, of.old, strict=True):
        ratio = (now - old).exp()
        bound = torch.tensor(math.exp(high if of.advantage > 0 else -low), dtype=torch.float64)
        product = product * (torch.minimum(ratio, bound) if of.advantage > 0 else torch.maximum(ratio, bound))
    return (-of.advantage * product ** (1 / len(of.now))).repeat(len(of.now))


def weighted(level: str, formula: Formula) -> Formula:
    """With importance weights: those of proximal policy over rollout, at most 2."""

    def loss(of: SimpleNamespace) -> torch.Tensor:
        logs = of.proximal - of.rollout
        whole = {"sequence": logs.sum(), "geometric": logs.mean()}
        return whole.get(level, logs).exp().clamp(max=2.0) * formula(of)

    return loss


PLAIN: dict[str, Any] = {"clip_low": 1.0, "clip_high": 99.0, "dual_clip": None, "importance": {"mode": "off"}}
"""PPO without bounds."""


def plain(of: SimpleNamespace) -> torch.Tensor:
    return -(of.now - of.old).exp() * of.advantage


def kl(estimator: str, formula: Formula) -> tuple[dict[str, Any], Formula]:
    """PPO without bounds, with a penalty of 0.3."""
    section = {"place": "loss", "estimator": estimator, "coefficient": 0.3}
    fields = PLAIN | {"kl": section, "reference": {"model": "frozen"}}
    return fields, lambda of: plain(of) + 0.3 * formula(of)


def k2(of: SimpleNamespace) -> torch.Tensor:
    return (of.now - of.reference) ** 2 / 2


def k3(of: SimpleNamespace) -> torch.Tensor:
    return (of.reference - of.now).exp() - 1 - (of.reference - of.now)


def with_gradient_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return value.detach() + other - other.detach()


OFF: dict[str, Any] = {"importance": {"mode": "off"}}
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "kl k1": kl("k1", lambda of: with_gradient_of(of.now - of.reference, k2(of))),
    "kl k2": kl("k2", k2),
    "kl k3+": kl("k3+", lambda of: with_gradient_of(k3(of), k2(of))),
    "kl abs": kl("abs", lambda of: (of.now - of.reference).abs()),
    "dppo_tv": (
        {"loss": "dppo_tv", "clip_low": 0.1, "clip_high": 0.15, **OFF},
        lambda of: dppo(of, "tv", 0.1, 0.15),
    ),
    "dppo_tv with a bound": (
        {"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "dppo": {"max_ratio": 1.2}, **OFF},
        lambda of: dppo(of, "tv", 0.2, 0.2, 1.2),
    ),
    "dppo_kl": (
        {"loss": "dppo_kl", "clip_low": 0.02, "clip_high": 0.05, **OFF},
        lambda of: dppo(of, "kl", 0.02, 0.05),
    ),
    "prime-rl's default": (
        {"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "rollout_penalty": 0.3, **OFF},
        lambda of: dppo(of, "tv", 0.2, 0.2) + 0.3 * (of.now - of.rollout) ** 2,
    ),
}


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("old", ["rollout", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_equals_its_formula(case, old, normalisation):
    fields, formula = CASES[case]
    check_formula(AlgorithmConfig(normalisation=normalisation, old_logprobs=old, **fields), formula)


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
def test_a_geometric_importance_weight_equals_its_formula(has_proximal, normalisation):
    fields: dict[str, Any] = {"loss": "gspo", "importance": {"mode": "truncate", "level": "geometric"}}
    algorithm = AlgorithmConfig(normalisation=normalisation, **fields)
    check_formula(algorithm, weighted("geometric", gspo), has_proximal)


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant", "sequence_sum"])
def test_gmpo_equals_its_formula(normalisation):
    fields: dict[str, Any] = {"loss": "gmpo", "clip_low": 0.3, "clip_high": 0.2, **ROLLOUT}
    check_formula(AlgorithmConfig(normalisation=normalisation, **fields), lambda of: gmpo(of, 0.3, 0.2))


@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
def test_reinforce_weighs_by_the_current_policy_and_without_weights_is_gpg(has_proximal):
    """A logprob and nothing else (arXiv 2504.02546): as verl's `gpg`."""

    def gpg(of: SimpleNamespace) -> torch.Tensor:
        return -of.advantage * of.now

    check_formula(AlgorithmConfig(loss="reinforce", **OFF), gpg, has_proximal)

    def reinforce(of: SimpleNamespace) -> torch.Tensor:
        return (of.now.detach() - of.rollout).exp().clamp(max=2.0) * gpg(of)

    check_formula(AlgorithmConfig(loss="reinforce"), reinforce, has_proximal)


REJECTION: dict[str, dict[str, Any]] = {
    "token weights, geometric": {"rejection": {"bounds": {"seq_mean_k1": [0.8, 1.3]}}},
    "token weights, k3 and a veto": {"rejection": {"bounds": {"seq_max_k3": 0.6}, "veto": 0.2}},
    "sequence weights, k2": {
        "importance": {"level": "sequence"},
        "rejection": {"bounds": {"seq_mean_k2": 0.3}},
    },
    "tokens": {"rejection": {"bounds": {"token_k1": 1.5, "token_k3": 0.2}}},
    "bypass": {"rejection": {"bounds": {"seq_sum_k1": [0.3, 4.0]}}, **OFF, **ROLLOUT},
}


def rejected(logs: list[float], rejection: Any) -> list[bool]:
    """Of one sequence, as verl's definitions read, with bounds of r."""
    estimates = {
        "k1": logs,
        "k2": [value**2 / 2 for value in logs],
        "k3": [math.exp(value) - 1 - value for value in logs],
    }

    def is_out(value: float, bound: Any) -> bool:
        if isinstance(bound, tuple):
            return not math.log(bound[0]) <= value <= math.log(bound[1])
        return bool(value > bound)

    out = [rejection.veto is not None and min(logs) < math.log(rejection.veto)] * len(logs)
    for name, bound in rejection.bounds.items():
        *level, measure = name.split("_")
        values = estimates[measure]
        if level[0] == "seq":
            whole = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[level[1]]
            values = [whole] * len(values)
        out = [was or is_out(value, bound) for was, value in zip(out, values, strict=True)]
    return out


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("case", REJECTION)
def test_what_is_rejected_is_in_no_term_and_leaves_the_mean_where_that_is_asked_for(
    case, denominator, has_proximal, normalisation
):
    fields = PLAIN | {"importance": {}} | REJECTION[case]
    fields["rejection"] = fields["rejection"] | {"denominator": denominator}
    algorithm = AlgorithmConfig(normalisation=normalisation, **fields)
    total_out, level = 0, algorithm.importance.level

    def formula(of: SimpleNamespace) -> torch.Tensor:
        nonlocal total_out
        is_out = torch.tensor(rejected((of.proximal - of.rollout).tolist(), algorithm.rejection))
        total_out += int(is_out.sum())
        of.num_kept -= int(is_out.sum()) if denominator == "kept" else 0
        is_off = algorithm.importance_mode == "off"
        return (plain if is_off else weighted(level, plain))(of) * ~is_out

    num_tokens = 0
    for seed in range(4):
        data, before = probable_rectangle(seed), total_out
        ours, our_gradient_BT, terms = our_loss(data, algorithm, has_proximal)
        theirs, their_gradient_BT, num_left_out = written_out(data, algorithm, has_proximal, formula)
        assert ours == pytest.approx(theirs, abs=1e-6)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)
        assert terms.sums["rejected"].item() == total_out - before
        assert num_left_out == (total_out - before if denominator == "kept" else 0)
        num_tokens += int(data.mask.sum())
    assert 0 < total_out < num_tokens


def test_constant_is_verls_norm_since_0_7_1_and_that_over_the_batch_before():
    """`seq-mean-token-sum-norm`, written from its formula: until 0.7.0 it did not divide by the batch."""
    data = rectangle(0)
    ours, our_gradient_BT, _ = our_loss(
        data, AlgorithmConfig(loss="reinforce", normalisation="constant", **OFF)
    )
    for divides, factor in ((True, 1.0), (False, 1.0 / len(data.advantages))):
        current_BT, mask_BT = torch.tensor(data.current, requires_grad=True), torch.tensor(data.mask)
        losses_BT = -torch.tensor(data.advantages)[:, None] * current_BT * mask_BT
        loss = losses_BT.sum() / MAX_COMPLETION / (len(mask_BT) if divides else 1)
        loss.backward()
        assert ours == pytest.approx(factor * loss.item(), abs=1e-5)
        np.testing.assert_allclose(our_gradient_BT, factor * current_BT.grad.numpy(), atol=1e-6)
