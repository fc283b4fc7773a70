"""The losses against formulas written again: loops over numpy scalars, and verl's normalisation."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import MAX_COMPLETION, our_loss, rectangle
from tidemill.common.config.algorithm import AlgorithmConfig

ROLLOUT: dict[str, Any] = {"old_logprobs": "rollout"}
REFERENCE: dict[str, Any] = {"reference": {"model": "frozen"}}


class Loops:
    """The papers' formulas, one token at a time, in float64."""

    def __init__(self, data: SimpleNamespace, algorithm: AlgorithmConfig, has_proximal: bool) -> None:
        self.data, self.algorithm, self.has_proximal = data, algorithm, has_proximal

    def loss(self) -> float:
        algorithm, per_sequence = self.algorithm, []
        for b in range(len(self.data.advantages)):
            tokens = np.flatnonzero(self.data.mask[b])
            per_sequence.append([self.token(b, t, tokens) for t in tokens])
        if algorithm.normalisation == "sequence":
            return sum(sum(terms) / len(terms) if terms else 0.0 for terms in per_sequence) / len(
                per_sequence
            )
        total = sum(map(sum, per_sequence))
        if algorithm.normalisation == "token":
            return total / sum(map(len, per_sequence))
        return total / (len(per_sequence) * MAX_COMPLETION)

    def old(self, b: int, t: int) -> float:
        if self.algorithm.old_logprobs == "rollout":
            return float(self.data.rollout[b, t])
        return float(self.data.proximal[b, t]) if self.has_proximal else float(self.data.current[b, t])

    def token(self, b: int, t: int, tokens: np.ndarray) -> float:
        algorithm, advantage = self.algorithm, float(self.data.advantages[b])
        logprob = float(self.data.current[b, t])
        ratio = math.exp(logprob - self.old(b, t))
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        if algorithm.loss == "gspo":
            logs = [float(self.data.current[b, u]) - self.old(b, u) for u in tokens]
            ratio = math.exp(sum(logs) / len(logs))
        if algorithm.loss in ("ppo", "gspo"):
            objective = min(ratio * advantage, max(min(ratio, high), low) * advantage)
            if algorithm.dual_clip_bound and advantage < 0:
                objective = max(objective, algorithm.dual_clip_bound * advantage)
        elif algorithm.loss == "cispo":
            objective = max(min(ratio, high), low) * advantage * logprob
        elif algorithm.loss == "sapo":
            temperature = 1.0 if advantage > 0 else 1.05
            objective = 4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * advantage
        else:
            objective = advantage * logprob
        return -self.weight(b, t, tokens) * objective + self.regularisation(b, t)

    def weight(self, b: int, t: int, tokens: np.ndarray) -> float:
        importance, mode = self.algorithm.importance, self.algorithm.importance_mode
        if mode == "off":
            return 1.0
        has_proximal = self.has_proximal and self.algorithm.loss != "reinforce"
        base = self.data.proximal if has_proximal else self.data.current
        logs = {u: float(base[b, u]) - float(self.data.rollout[b, u]) for u in tokens}
        if importance.level == "token":
            weight = math.exp(logs[t])
        else:
            share = len(logs) if importance.level == "geometric" else 1
            weight = math.exp(sum(logs.values()) / share)
        if mode == "truncate":
            return max(importance.low, min(importance.high, weight))
        return weight if importance.low <= weight <= importance.high else 0.0

    def regularisation(self, b: int, t: int) -> float:
        algorithm = self.algorithm
        value = -algorithm.entropy_coefficient * float(self.data.entropies[b, t])
        if algorithm.kl.place == "loss":
            d = float(self.data.current[b, t]) - float(self.data.reference[b, t])
            estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[algorithm.kl.estimator]
            value += algorithm.kl.coefficient * estimate
        return value


CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo rollout": ROLLOUT,
    "ppo dual clip": {"dual_clip": 1.6, **ROLLOUT},
    "gspo rollout": {"loss": "gspo", **ROLLOUT},
    "gspo geometric": {"loss": "gspo", "importance": {"level": "geometric"}},
    "cispo": {"loss": "cispo", "clip_low": 0.5, "clip_high": 1.0, **ROLLOUT},
    "sapo": {"loss": "sapo", **ROLLOUT},
    "reinforce": {"loss": "reinforce"},
    "masked tokens": {"importance": {"mode": "mask", "low": 0.5, "high": 1.5}},
    "masked sequences": {"importance": {"mode": "mask", "level": "sequence", "low": 0.1, "high": 9.0}},
    "truncated sequences": {"importance": {"level": "sequence", "low": 0.5, "high": 3.0}},
    "no weights": {"importance": {"mode": "off"}},
    "entropy": {"entropy_coefficient": 0.3},
    **{
        f"kl {k}": {"kl": {"place": "loss", "estimator": k, "coefficient": 0.2}, **REFERENCE}
        for k in ("k1", "k2", "k3")
    },
}


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formulas_written_as_loops(case, has_proximal, normalisation):
    algorithm = AlgorithmConfig(normalisation=normalisation, **CASES[case])
    for seed in range(3):
        data = rectangle(seed)
        ours, _, _ = our_loss(data, algorithm, has_proximal)
        assert ours == pytest.approx(Loops(data, algorithm, has_proximal).loss(), abs=1e-5)


def verl_norm(losses_BT: torch.Tensor, mask_BT: torch.Tensor, scale: float, divides: bool) -> torch.Tensor:
    """verl's `seq-mean-token-sum-norm`, written from its formula: until 0.7.0 without `divides`."""
    total = (losses_BT * mask_BT).sum() / scale
    return total / len(mask_BT) if divides else total


def test_constant_is_verls_norm_since_0_7_1_and_that_over_the_batch_before():
    data = rectangle(0)
    algorithm = AlgorithmConfig(loss="reinforce", normalisation="constant", importance={"mode": "off"})
    ours, our_gradient_BT, _ = our_loss(data, algorithm)
    for divides, factor in ((True, 1.0), (False, 1.0 / len(data.advantages))):
        current_BT = torch.tensor(data.current, requires_grad=True)
        losses_BT = -torch.tensor(data.advantages)[:, None] * current_BT
        loss = verl_norm(losses_BT, torch.tensor(data.mask), MAX_COMPLETION, divides)
        loss.backward()
        assert ours == pytest.approx(factor * loss.item(), abs=1e-5)
        np.testing.assert_allclose(our_gradient_BT, factor * current_BT.grad.numpy(), atol=1e-6)
