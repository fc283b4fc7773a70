"""What is rejected, by hand and against loops over numpy scalars; what becomes of the loss without it."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import MAX_COMPLETION, loss_of, make_tokens, our_loss, probable_rectangle, tensor
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import RejectionConfig
from tidemill.common.config.algorithm_table import CORRECTIONS
from tidemill.services.trainer.algorithm.losses.rejection import rejected_tokens

RATIOS = [0.5, 3.0, 1.1]
"""The first two tokens are one sequence: product 1.5, geometric mean 1.2247."""
IDS = torch.tensor([0, 0, 1])
K2 = [math.log(r) ** 2 / 2 for r in RATIOS]  # 0.2402, 0.6035, 0.0045
K3 = [r - 1 - math.log(r) for r in RATIOS]  # 0.1931, 0.9014, 0.0047


@pytest.mark.parametrize(
    ("criterion", "rejected"),
    [
        ({"token_k1": [0.6, 4.0]}, [1, 0, 0]),
        ({"token_k1": [0.5, 3.0]}, [0, 0, 0]),
        ({"token_k1": 2.5}, [0, 1, 0]),  # 0.4 to 2.5
        ({"token_k2": 0.3}, [0, 1, 0]),
        ({"token_k3": 0.1}, [1, 1, 0]),
        ({"seq_sum_k1": [0.5, 1.4]}, [1, 1, 0]),
        ({"seq_sum_k1": [0.5, 1.6]}, [0, 0, 0]),
        ({"seq_sum_k2": 0.84}, [1, 1, 0]),
        ({"seq_sum_k2": 0.85}, [0, 0, 0]),
        ({"seq_sum_k3": 1.09}, [1, 1, 0]),
        ({"seq_sum_k3": 1.1}, [0, 0, 0]),
        ({"seq_mean_k1": [0.9, 1.2]}, [1, 1, 0]),
        ({"seq_mean_k1": [1.0, 1.23]}, [0, 0, 0]),
        ({"seq_mean_k2": 0.42}, [1, 1, 0]),
        ({"seq_mean_k3": 0.55}, [0, 0, 0]),
        ({"seq_max_k2": 0.6}, [1, 1, 0]),
        ({"seq_max_k3": 0.91}, [0, 0, 0]),
        ({"veto": 0.6}, [1, 1, 0]),
        ({"veto": 0.4}, [0, 0, 0]),
        ({"token_k1": [0.6, 4.0], "seq_mean_k2": 0.001}, [1, 1, 1]),
    ],
    ids=str,
)
def test_each_criterion_by_hand(criterion, rejected):
    veto = criterion.get("veto")
    rejection = RejectionConfig(bounds={} if veto else criterion, veto=veto)
    found_N = rejected_tokens(tensor(*RATIOS).log(), IDS, 2, rejection)
    assert found_N.int().tolist() == rejected


def test_a_rejected_token_is_in_no_term_and_leaves_the_mean_where_that_is_asked_for():
    # Weights 1/2 each; the second token has the ratio 3 and is rejected.
    fields = {"weights_N": tensor(0.5, 0.5), "reference_logprobs_N": tensor(0.1, 0.1).log()}
    algorithm: dict[str, Any] = {
        "normalisation": "sequence",
        "reference": {"model": "frozen"},
        "kl": {"place": "loss", "estimator": "abs", "coefficient": 0.1},
    }
    for denominator, weight in (("all", 0.5), ("kept", 1.0)):
        tokens = make_tokens([0.2, 0.6], [0.4, 0.2], [1.0, 1.0], **fields)
        rejection = {"bounds": {"token_k1": [0.4, 2.0]}, "denominator": denominator}
        terms = loss_of(tokens, rejection=rejection, **algorithm)
        terms.loss.backward()
        # The first one: importance weight 0.5, the ratio is 1, |log 2| to the reference.
        assert terms.loss.item() == pytest.approx(weight * (-0.5 + 0.1 * math.log(2)))
        np.testing.assert_allclose(tokens.logprobs_N.grad, [weight * (-0.5 + 0.1), 0.0])
        assert terms.sums["rejected"].item() == 1


def loops(logs: list[float], rejection: RejectionConfig) -> list[bool]:
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


CASES: dict[str, dict[str, Any]] = {
    "token weights, geometric": {"rejection": {"bounds": {"seq_mean_k1": [0.8, 1.3]}}},
    "token weights, k3 and a veto": {"rejection": {"bounds": {"seq_max_k3": 0.6}, "veto": 0.2}},
    "sequence weights, k2": {
        "importance": {"level": "sequence"},
        "rejection": {"bounds": {"seq_mean_k2": 0.3}},
    },
    "tokens": {"rejection": {"bounds": {"token_k1": 1.5, "token_k3": 0.2}}},
    "bypass": {"old_logprobs": "rollout", "rejection": {"bounds": {"seq_sum_k1": [0.3, 4.0]}}},
}


def written_out(data: Any, algorithm: AlgorithmConfig, has_proximal: bool) -> tuple[float, np.ndarray, int]:
    """REINFORCE or PPO without its clip, token by token in float64: loss, gradient, and what is rejected."""
    now_BT = torch.tensor(data.current, dtype=torch.float64, requires_grad=True)
    is_bypass, level = algorithm.old_logprobs == "rollout", algorithm.importance.level
    total, num_kept, num_out = torch.zeros((), dtype=torch.float64), 0, 0
    is_kept = algorithm.rejection.denominator == "kept"
    for b, advantage in enumerate(data.advantages.tolist()):
        own = np.flatnonzero(data.mask[b])
        base = data.proximal if has_proximal and not is_bypass else data.current
        logs = [float(base[b, t]) - float(data.rollout[b, t]) for t in own]
        if not logs:
            continue
        out = loops(logs, algorithm.rejection)
        terms = []
        for t, log, is_out in zip(own, logs, out, strict=True):
            if is_out:
                continue
            old = data.rollout[b, t] if is_bypass else base[b, t]
            weight = min(2.0, math.exp(sum(logs) if level == "sequence" else log))
            terms.append(-(1.0 if is_bypass else weight) * (now_BT[b, t] - float(old)).exp() * advantage)
        num_kept, num_out = num_kept + len(terms), num_out + sum(out)
        share = len(terms) if is_kept else len(own)
        is_mean = algorithm.normalisation == "sequence"
        total = total + sum(terms, torch.zeros(())) / (max(share, 1) if is_mean else 1)
    size = {
        "sequence": len(data.mask),
        "token": num_kept if is_kept else int(data.mask.sum()),
        "constant": len(data.mask) * MAX_COMPLETION,
    }
    (total / size[algorithm.normalisation]).backward()
    assert now_BT.grad is not None
    return total.item() / size[algorithm.normalisation], now_BT.grad.numpy(), num_out


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("has_proximal", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("case", CASES)
def test_equals_loops_in_value_and_gradient(case, denominator, has_proximal, normalisation):
    fields = CASES[case] | {"rejection": CASES[case]["rejection"] | {"denominator": denominator}}
    bounds = {"clip_low": 1.0, "clip_high": 99.0, "dual_clip": None}
    algorithm = AlgorithmConfig(normalisation=normalisation, **bounds, **fields)
    has_proximal = has_proximal and algorithm.old_logprobs == "recompute"
    total_out = 0
    for seed in range(4):
        data = probable_rectangle(seed)
        ours, our_gradient_BT, terms = our_loss(data, algorithm, has_proximal)
        theirs, their_gradient_BT, num_out = written_out(data, algorithm, has_proximal)
        assert ours == pytest.approx(theirs, abs=1e-6)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)
        assert terms.sums["rejected"].item() == num_out
        total_out += num_out
    assert 0 < total_out < 4 * data.mask.sum()


class TestCorrections:
    def test_each_name_of_verl_is_a_valid_section_and_given_fields_win(self):
        for name in CORRECTIONS:
            algorithm = AlgorithmConfig(correction=name)
            assert algorithm.correction == name
            assert AlgorithmConfig.model_validate(algorithm.model_dump(mode="json")) == algorithm
        given = AlgorithmConfig(correction="decoupled_geo_rs_token_tis", importance={"high": 5.0})
        assert (given.importance.level, given.importance.high) == ("token", 5.0)
        assert given.rejection.bounds["seq_mean_k1"] == pytest.approx((0.999, 1.001), abs=2e-6)

    def test_three_of_them_by_hand(self):
        geo = AlgorithmConfig(correction="bypass_pg_geo_rs_token_tis")
        assert (geo.loss, geo.importance_mode, geo.importance.level) == ("reinforce", "truncate", "token")
        k3 = AlgorithmConfig(correction="decoupled_k3_rs")
        assert (k3.importance_mode, k3.rejection.bounds) == ("off", {"seq_mean_k3": 0.01})
        ppo = AlgorithmConfig(correction="bypass_ppo_clip", loss="ppo")
        assert (ppo.old_logprobs, ppo.rejection.is_on) == ("rollout", False)
