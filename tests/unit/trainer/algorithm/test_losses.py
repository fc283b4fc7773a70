"""The losses by hand: a table of worked examples, and what each choice does to gradients.

The arithmetic is written beside each expectation. Logprobs are given as logs of round probabilities. Formulas
written again are in test_losses_independent.py.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import loss_of, make_tokens, tensor
from tests.support.models import make_samples
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig, RejectionConfig, TeacherTermConfig
from tidemill.common.config.algorithms.table import CORRECTIONS
from tidemill.services.trainer.algorithm.advantages.shaping import shaped_reward
from tidemill.services.trainer.algorithm.losses.rejection import rejected_tokens
from tidemill.services.trainer.algorithm.losses.sums import Sums, add_tiles, loss_metrics
from tidemill.services.trainer.algorithm.losses.terms import (
    kl_penalty,
    rollout_penalty,
    teacher_kl,
    value_loss,
)
from tidemill.services.trainer.algorithm.losses.tokens import denominator, token_weight
from tidemill.services.trainer.policy.head import score_logits

ROOT = Path(__file__).parents[4]
ROLLOUT = {"old_logprobs": "rollout"}
FROZEN = {"reference": {"model": "frozen"}}
LOG2 = math.log(2.0)
LOG15 = math.log(1.5)
TWO_AND_ONE: dict[str, Any] = {"sequence_N": torch.tensor([0, 0, 1]), "num_sequences": 2}
"""The first two tokens are one sequence, the third is another."""


def example(
    name: str,
    algorithm: dict[str, Any],
    now: list[float],
    rollout: list[float],
    advantages: list[float],
    loss: float | None,
    gradient: list[float] | None = None,
    fields: dict[str, Any] | None = None,
    **sums: float,
) -> Any:
    return pytest.param(algorithm, (now, rollout, advantages), fields or {}, loss, gradient, sums, id=name)


def clipped(name: str, ratio: float, advantage: float, loss: float, slope: float, **sums: float) -> Any:
    """One token by its ratio to 0.1, with bounds 0.8, 1.28 and 3; the slope is by the logprob."""
    return example(
        name, {"dual_clip": 3.0, **ROLLOUT}, [ratio / 10], [0.1], [advantage], loss, [slope], **sums
    )


S = math.sqrt(1.08)
"""The geometric mean of ratios 1.2 and 0.9."""
PROXIMAL = {"proximal_logprobs_N": tensor(0.5, 0.5).log()}
VALUES = {
    "values_N": tensor(1.0, 0.0),
    "old_values_N": tensor(0.5, 0.0),
    "returns_N": tensor(0.0, 3.0),
    "weights_N": tensor(1.0, 0.5),
}
GMPO = ([0.2 * math.exp(0.5), 0.5 * math.exp(0.1), 0.5 * math.exp(-0.5)], [0.2, 0.5, 0.5], [2.0, 2.0, -1.0])
TAUGHT = {"teacher_logprobs_N": tensor(0.25, 0.5, 1.0).log(), "teacher_weights_N": tensor(1.0, 2.0, 0.0)}
TAUGHT_TOKENS = ([0.5, 0.25, 0.3], [0.5, 0.25, 0.3], [0.0] * 3)
"""d = log 2 and -log 2, weighed once and twice; the third token has no teacher."""
OFF_POLICY = (
    [0.25, 0.2, 0.25, 0.2], [0.5, 0.4, 0.5, 0.4], [-1.0, -1.0, 1.0, 1.0], None
)  # fmt: skip
FOUR: dict[str, Any] = {"sequence_N": torch.tensor([0, 0, 1, 1]), "num_sequences": 2}


def sapo_slope(r: float, t: float) -> float:
    """d/dr [4 / t sigmoid(t (r - 1))] = 4 p (1 - p), times r; at r = 1 it is 1."""
    p = 1 / (1 + math.exp(-t * (r - 1)))
    return 4 * p * (1 - p) * r


@pytest.mark.parametrize(
    ("algorithm", "logprobs", "fields", "loss", "gradient", "sums"),
    [
        clipped("ratio 1", 1.0, 2.0, -2.0, -2.0),
        clipped("inside", 1.2, 2.0, -2.4, -2.4),
        clipped("clipped above", 1.5, 2.0, -2.56, 0.0, clipped_high=1),  # min(3.0, 1.28 * 2)
        clipped("good and now unlikely", 0.5, 2.0, -1.0, -1.0, clipped_low=0),  # min(1.0, 0.8 * 2)
        clipped("clipped below", 0.5, -2.0, 1.6, 0.0, clipped_low=1),  # min(-1.0, 0.8 * -2)
        clipped("bad and now likely", 1.5, -2.0, 3.0, 3.0, clipped_high=0),  # min(-3.0, 1.28 * -2)
        clipped("beyond the dual clip", 5.0, -2.0, 6.0, 0.0, clipped_dual=1),  # max(min(-10, -2.56), 3 * -2)
        clipped("below the dual clip", 2.0, -2.0, 4.0, 4.0, clipped_dual=0),
        clipped("a positive advantage has its own clip", 5.0, 2.0, -2.56, 0.0, clipped_dual=0),
        # current / rollout = 0.5, 1.5, 9 -> 2; the ratio is 1: staleness never silences a token.
        # loss = -(0.5 * 1 + 1.5 * -2 + 2 * 3); raw weights 0.5 + 1.5 + 9, 0.25 + 2.25 + 81
        example(
            "recompute weighs each token and never clips", {},
            [0.2, 0.6, 0.9], [0.4, 0.4, 0.1], [1.0, -2.0, 3.0], -3.5, [-0.5, 3.0, -6.0],
            clipped_low=0, clipped_high=0, weights_bounded=1, weight_sum=4.0, weight_max=2.0,
            raw_weight_sum=11.0, raw_weight_square_sum=83.5,
        ),
        # Ratios 0.5, 1.5, 9: min(-0.5, -0.8); min(1.5, 1.28); min(-27, -3.84). d(ratio) / d(logprob) = ratio
        example(
            "rollout clips the ratio", {"dual_clip": None, **ROLLOUT},
            [0.2, 0.6, 0.9], [0.4, 0.4, 0.1], [-1.0, 1.0, -3.0], 0.8 - 1.28 + 27, [0.0, 0.0, 27.0],
            clipped_low=1, clipped_high=1, weights_bounded=0, weight_sum=3.0, weight_max=1.0,
        ),
        # current / proximal 1.2 and 0.8; proximal / rollout 1.25, 5 -> 2: 1.25 * 1.2 + 2 * min(-0.8, -0.9)
        example(
            "decoupled", {"clip_low": 0.1, "clip_high": 0.5},
            [0.6, 0.4], [0.4, 0.1], [1.0, -1.0], 0.3, [-1.5, 0.0], PROXIMAL, clipped_low=1,
        ),
        # It has no ratio: its weights are current / rollout, 1.5 and 4 -> 2
        example(
            "reinforce", {"loss": "reinforce"},
            [0.6, 0.4], [0.4, 0.1], [1.0, -1.0], None, [-1.5, 2.0], PROXIMAL,
        ),
        # Ratios 1.2, 0.9, and 0.5 alone: -(2 s + min(-0.5, -0.8)). d s / d logprob = s / 2 for each of two
        example(
            "gspo", {"loss": "gspo", **ROLLOUT},
            [0.6, 0.45, 0.25], [0.5] * 3, [1.0, 1.0, -1.0], 0.8 - 2 * S, [-S, -S, 0.0], TWO_AND_ONE,
            clipped_low=1,
        ),
        example(
            "gspo's mean over sequences", {"loss": "gspo", "normalisation": "sequence", **ROLLOUT},
            [0.6, 0.45, 0.25], [0.5] * 3, [1.0, 1.0, -1.0], 0.8 - S, None,
            TWO_AND_ONE | {"weights_N": tensor(0.5, 0.5, 1.0)},
        ),
        # Two sequences of 2 and 1 tokens with the ratio 1, weighed by their lengths
        example(
            "luspo", {"loss": "gspo", "normalisation": "sequence_sum", **ROLLOUT},
            [0.5] * 3, [0.5] * 3, [1.0, 1.0, -3.0], 1.0, None, TWO_AND_ONE,
        ),
        # Ratios 1.5, 9 -> 5, 0.5; with clip_low 1 there is no lower bound
        example(
            "cispo", {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, **ROLLOUT},
            [0.6, 0.9, 0.2], [0.4, 0.1, 0.4], [1.0, 2.0, -1.0],
            -(1.5 * math.log(0.6) + 10 * math.log(0.9) - 0.5 * math.log(0.2)), [-1.5, -10.0, 0.5],
            clipped_high=1,
        ),
        # Ratios 0.4 -> 0.5 twice: what the bound changed counts where PPO would have silenced the token too
        example(
            "cispo from below", {"loss": "cispo", "clip_low": 0.5, **ROLLOUT},
            [0.2, 0.2], [0.5, 0.5], [1.0, -1.0], 0.0, [-0.5, 0.5], clipped_low=1,
        ),
        example(
            "sapo fades on both sides of one", {"loss": "sapo", **ROLLOUT},
            [0.5, 0.9, 0.3], [0.5, 0.3, 0.9], [1.0, 1.0, -1.0], None,
            [-1.0, -sapo_slope(3.0, 1.0), sapo_slope(1 / 3, 1.05)],
        ),
        # Log-ratios 0.5 and 0.1, the first stops at 0.4; -0.5 with A = -1 stops at -0.4. Both tokens of the
        # first sequence have its objective; its slope is half of it for each of them.
        example(
            "gmpo", {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, **ROLLOUT}, *GMPO,
            -4 * math.exp(0.25) + math.exp(-0.4), [0.0, -2 * math.exp(0.25), 0.0], TWO_AND_ONE,
            clipped_high=1, clipped_low=1,
        ),
        # W = 1.5 * 4/3 = 2: 4 exp(-3) with A >= 0, 8 exp(-2) with A < 0
        *(
            example(
                f"vespo {a}", {"loss": "vespo", **ROLLOUT}, [0.6, 0.4], [0.4, 0.3], [a] * 2,
                -phi * a * math.log(0.24), [-phi * a] * 2,
            )
            for a, phi in ((1.0, 4 * math.exp(-3)), (-1.0, 8 * math.exp(-2)))
        ),
        # p - q: 0.3 with A = 2, 0.3 with A = -2, -0.3 and -0.1 with A = -1: the first and the third are too
        # far. Ratios of the others: 2.5 and 0.8
        example(
            "dppo_tv", {"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, **ROLLOUT},
            [0.5, 0.5, 0.2, 0.4], [0.2, 0.2, 0.5, 0.5], [2.0, -2.0, -1.0, -1.0], 5.8, [0.0, 5.0, 0.0, 0.8],
            clipped_high=1, clipped_low=1,
        ),
        # A rare token may multiply: PPO would silence a ratio of 50, and p - q is 0.049
        *(
            example(
                f"dppo_tv of a rare token, {bound}",
                {"loss": "dppo_tv", "dppo": {"max_ratio": bound}, **ROLLOUT},
                [0.05], [0.001], [1.0], -weight, [-weight], clipped_dual=int(bound is not None),
            )
            for bound, weight in ((None, 50.0), (20.0, 20.0))
        ),
        # 0.2 log 0.4 + 0.8 log 1.6 = 0.1927 for p = 0.5, q = 0.2
        *(
            example(
                f"dppo_kl {bound}", {"loss": "dppo_kl", "clip_high": bound, "clip_low": 0.0, **ROLLOUT},
                [0.5], [0.2], [1.0], loss,
            )
            for bound, loss in ((0.19, 0.0), (0.2, -2.5))
        ),
        # r = 1.2, A = 2: 2.4, less 0.5 * log 1.2 where penalised; slope 2.4 - 0.5
        example(
            "kl_cov", {"loss": "kl_cov", "covariance": {"coefficient": 0.5}, **ROLLOUT},
            [0.6, 0.6], [0.5, 0.5], [2.0, 2.0], -4.8 + 0.5 * math.log(1.2), [-1.9, -2.4],
            {"penalised_N": tensor(1.0, 0.0)},
        ),
        # rollout / now = 2 for both tokens of each of two sequences; log 2 = 0.693
        example(
            "the off-policy mask", {"off_policy_threshold": 0.5}, *OFF_POLICY, [0.0, 0.0, -0.5, -0.5], FOUR,
            off_policy=2,
        ),
        example(
            "the off-policy mask, far", {"off_policy_threshold": 0.7}, *OFF_POLICY, [0.5, 0.5, -0.5, -0.5],
            FOUR, off_policy=0,
        ),
        example(
            "the penalty towards the rollout", {"rollout_penalty": 0.1}, [0.6], [0.4], [0.0],
            0.1 * LOG15**2, [0.2 * LOG15],
        ),
        example(
            "KL is weighted as the token is, and counted",
            {"kl": {"place": "loss", "estimator": "k2", "coefficient": 0.1}, **FROZEN},
            [0.6], [0.6], [0.0], 0.5 * 0.1 * LOG15**2 / 2, None,
            {"weights_N": tensor(0.5), "reference_logprobs_N": tensor(0.4).log()}, kl_sum=LOG15**2 / 2,
        ),
        example(
            "a reference without a penalty is only measured", FROZEN, [0.6], [0.6], [0.0], 0.0, None,
            {"reference_logprobs_N": tensor(0.4).log()}, kl_sum=2 / 3 - 1 + LOG15,
        ),
        example(
            "the entropy bonus", {"entropy_coefficient": 0.1}, [0.6, 0.6], [0.6, 0.6], [0.0, 0.0],
            -0.1 * (1.0 + 1.5), None, {"entropies_N": tensor(1.0, 3.0), "weights_N": tensor(1.0, 0.5)},
            entropy_sum=4.0,
        ),
        # 0.1 * (1 * 0.5 + 0.5 * 4.5)
        example(
            "the value loss", {"advantage": "gae", "value": {"coefficient": 0.1, "clip": None}},
            [0.6, 0.6], [0.6, 0.6], [0.0, 0.0], 0.275, None, VALUES,
            value_loss_sum=5.0, value_square_error_sum=9.25, return_sum=3.0, return_square_sum=9.0,
        ),
        *(
            example(
                f"a teacher by {estimator}", {"teacher": {"place": "loss", "estimator": estimator}},
                *TAUGHT_TOKENS, first + 2 * second, [first_slope, 2 * second_slope, 0.0], TAUGHT,
                teacher_kl_sum=first + second, teacher_tokens=2,
            )
            for estimator, first, second, first_slope, second_slope in (
                ("k1", LOG2, -LOG2, LOG2, -LOG2),
                ("k2", LOG2**2 / 2, LOG2**2 / 2, LOG2, -LOG2),
                ("k3", LOG2 - 0.5, 1.0 - LOG2, 0.5, -1.0),
            )
        ),
        example(
            "beyond a teacher's clip a token keeps the gradient of the bound",
            {"teacher": {"place": "loss", "clip": 0.5}}, *TAUGHT_TOKENS, None, [0.5, -1.0, 0.0], TAUGHT,
        ),
        example("a teacher in the reward", {}, *TAUGHT_TOKENS, 0.0, [0.0] * 3, TAUGHT),
        # 0.1 * log 4 and 2 * log 2 of demonstrations; the token between them has a ratio of 1 and A = 2, and
        # is the only one that the rollout's logprobs are compared for.
        *(
            example(
                f"demonstrations beside a sampled token, {old}",
                {"old_logprobs": old, "entropy_coefficient": 0.5, "kl": {"place": "loss"}, **FROZEN},
                [0.25, 0.5, 0.5], [1.0, 0.5, 1.0], [9.0, 2.0, 9.0], 0.1 * 2 * LOG2 - 2.0 + 2 * LOG2,
                [-0.1, -2.0, -2.0],
                {"imitation_N": tensor(0.1, 0.0, 2.0), "reference_logprobs_N": tensor(1.0, 0.5, 1.0).log()},
                imitation_sum=3 * LOG2, imitation_tokens=2, mismatch_sum=0, weight_sum=1, weight_max=1,
                raw_weight_sum=1, raw_weight_square_sum=1, kl_sum=0,
            )
            for old in ("recompute", "rollout")
        ),
        # k3 = r - 1 - log r at r = 0.5 and r = 1.5; |log 0.5| and |log 1.5|
        *(
            example(
                f"mismatch with the rollout, {old}", {"old_logprobs": old},
                [0.2, 0.6], [0.4, 0.4], [1.0, 1.0], None,
                rollout_kl_sum=LOG2 - LOG15, mismatch_sum=LOG2 + LOG15, mismatch_max=LOG2,
            )
            for old in ("recompute", "rollout")
        ),
    ],
)  # fmt: skip
def test_worked_examples(algorithm, logprobs, fields, loss, gradient, sums):
    tokens = make_tokens(*logprobs, **fields)
    terms = loss_of(tokens, **algorithm)
    terms.loss.backward()
    if loss is not None:
        assert terms.loss.item() == pytest.approx(loss)
    if gradient is not None:
        np.testing.assert_allclose(tokens.logprobs_N.grad, gradient, rtol=1e-7, atol=1e-12)
    assert {name: terms.sums[name].item() for name in sums} == pytest.approx(sums)
    assert ("teacher_kl_sum" in terms.sums) == ("teacher" in algorithm)


def test_the_entropy_bonus_has_the_gradient_of_its_coefficient():
    entropies_N = tensor(1.0, 3.0).requires_grad_()
    fields = {"entropies_N": entropies_N, "weights_N": tensor(1.0, 0.5)}
    loss_of(make_tokens([0.6] * 2, [0.6] * 2, [0.0] * 2, **fields), entropy_coefficient=0.1).loss.backward()
    np.testing.assert_allclose(entropies_N.grad, [-0.1, -0.05])


RATIOS = [0.25, 1.0, 1.5, 8.0]
PAIRS = [0.25, 2.0, 1.5, 6.0]
"""Of two sequences: products 0.5 and 9; geometric means 0.707 and 3."""


def test_importance_weights_are_off_against_the_rollout_unless_said_otherwise():
    assert AlgorithmConfig(old_logprobs="rollout").importance_mode == "off"
    assert AlgorithmConfig().importance_mode == "truncate"


@pytest.mark.parametrize(
    ("criterion", "rejected"),
    [
        # Ratios 0.5 and 3 are one sequence: product 1.5, geometric mean 1.2247; 1.1 is another.
        # k2: 0.2402, 0.6035, 0.0045; k3: 0.1931, 0.9014, 0.0047
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
        ({"seq_sum_k2": 0.84, "seq_max_k3": 0.91}, [1, 1, 0]),  # each has to hold
        ({"veto": 0.6}, [1, 1, 0]),
        ({"veto": 0.4}, [0, 0, 0]),
        ({"token_k1": [0.6, 4.0], "seq_mean_k2": 0.001}, [1, 1, 1]),
    ],
    ids=str,
)
def test_rejection_by_hand(criterion, rejected):
    veto = criterion.get("veto")
    rejection = RejectionConfig(bounds={} if veto else criterion, veto=veto)
    found_N = rejected_tokens(tensor(0.5, 3.0, 1.1).log(), torch.tensor([0, 0, 1]), 2, rejection)
    assert found_N.int().tolist() == rejected


@pytest.mark.parametrize(("denominator", "weight"), [("all", 0.5), ("kept", 1.0)])
def test_a_rejected_token_is_in_no_term(denominator, weight):
    # Weights 1/2 each; the second token has the ratio 3 and is rejected. The first one: importance weight
    # 0.5, the ratio is 1, |log 2| to the reference.
    fields = {"weights_N": tensor(0.5, 0.5), "reference_logprobs_N": tensor(0.1, 0.1).log()}
    tokens = make_tokens([0.2, 0.6], [0.4, 0.2], [1.0, 1.0], **fields)
    rejection = {"bounds": {"token_k1": [0.4, 2.0]}, "denominator": denominator}
    kl = {"place": "loss", "estimator": "abs", "coefficient": 0.1}
    terms = loss_of(tokens, rejection=rejection, normalisation="sequence", kl=kl, **FROZEN)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(weight * (-0.5 + 0.1 * LOG2))
    np.testing.assert_allclose(tokens.logprobs_N.grad, [weight * (-0.5 + 0.1), 0.0])
    assert terms.sums["rejected"].item() == 1


def test_corrections_have_verls_names_and_given_fields_win():
    for name in CORRECTIONS:
        algorithm = AlgorithmConfig(correction=name)
        assert AlgorithmConfig.model_validate(algorithm.model_dump(mode="json")) == algorithm
    config = AlgorithmConfig(correction="decoupled_geo_rs_token_tis", importance={"high": 5.0})
    assert (config.importance.level, config.importance.high) == ("token", 5.0)
    assert config.rejection.bounds["seq_mean_k1"] == pytest.approx((0.999, 1.001), abs=2e-6)
    geo = AlgorithmConfig(correction="bypass_pg_geo_rs_token_tis")
    assert (geo.loss, geo.importance_mode, geo.importance.level) == ("reinforce", "truncate", "token")
    k3 = AlgorithmConfig(correction="decoupled_k3_rs")
    assert (k3.importance_mode, k3.rejection.bounds) == ("off", {"seq_mean_k3": 0.01})
    ppo = AlgorithmConfig(correction="bypass_ppo_clip", loss="ppo")
    assert (ppo.old_logprobs, ppo.rejection.is_on) == ("rollout", False)


LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo rollout": ROLLOUT,
    "reinforce": {"loss": "reinforce"},
    "clip_cov": {"loss": "clip_cov"},
    "gspo": {"loss": "gspo", "importance": {"level": "sequence"}},
    **{
        name: {"loss": name, **ROLLOUT}
        for name in ("cispo", "sapo", "dppo_tv", "dppo_kl", "gmpo", "vespo", "kl_cov")
    },
}


@pytest.mark.parametrize("case", LOSSES)
def test_on_policy_every_loss_has_the_plain_policy_gradient(case):
    probabilities = [0.2, 0.6, 0.9]
    advantages = [1.0, 1.0, 3.0]
    fields = TWO_AND_ONE | {"weights_N": tensor(0.5, 0.5, 1.0)}
    tokens = make_tokens(probabilities, probabilities, advantages, **fields)
    terms = loss_of(tokens, **LOSSES[case])
    terms.loss.backward()
    np.testing.assert_allclose(tokens.logprobs_N.grad, [-0.5, -0.5, -3.0], atol=1e-12)
    assert terms.sums["weight_max"].item() == 1.0
    for name in ("rollout_kl_sum", "mismatch_sum", "clipped_low", "clipped_high"):
        assert terms.sums[name].item() == 0.0


@pytest.mark.parametrize("case", LOSSES)
def test_absurd_ratios_stay_finite(case):
    # e^499 is infinite in float32
    far_N = torch.tensor([-500.0, -1.0])
    near_N = torch.tensor([-1.0, -500.0])
    tokens = make_tokens(
        [0.5, 0.5], [0.5, 0.5], [-1.0, 1.0], logprobs_N=near_N.requires_grad_(), rollout_logprobs_N=far_N,
        advantages_N=torch.tensor([-1.0, 1.0]), sequence_N=torch.tensor([0, 1]), num_sequences=2,
        reference_logprobs_N=far_N,
    )  # fmt: skip
    terms = loss_of(tokens, kl={"place": "loss"}, **FROZEN, **LOSSES[case])
    terms.loss.backward()
    assert torch.isfinite(terms.loss) and torch.isfinite(near_N.grad).all()
    assert all(torch.isfinite(value) for value in terms.sums.values())


CORRECTED: dict[str, Any] = {"estimator": "corrected_k3", "ratio": 50.0}
KINDS = ("k1", "k2", "k3", "k3+", "corrected_k3", "abs")


class TestKl:
    @pytest.mark.parametrize(
        ("estimator", "is_right"),
        [("k1", True), ("k2", True), ("k3", False), ("k3+", True), ("corrected_k3", True), ("abs", False)],
    )
    def test_which_gradients_are_that_of_the_true_kl(self, estimator, is_right):
        """In expectation over the policy's own tokens, written out over a vocabulary of four."""
        logits = tensor(0.3, -0.5, 1.2, 0.0).requires_grad_()
        reference = tensor(0.1, 0.2, 0.3, 0.4).log()
        true = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
        (expected,) = torch.autograd.grad(true, logits)
        logprobs_N = logits.log_softmax(0)
        # Also where another policy samples, if corrected for that.
        sampled = logprobs_N.detach() if estimator != "corrected_k3" else tensor(0.4, 0.3, 0.2, 0.1).log()
        ratio_N = (logprobs_N - sampled).exp()
        penalty_N = kl_penalty(logprobs_N, reference, KlConfig(estimator=estimator), ratio_N)
        estimated = (sampled.exp() * penalty_N).sum()
        (gradient,) = torch.autograd.grad(estimated, logits)
        assert torch.allclose(gradient, expected, atol=1e-9) is is_right
        if estimator not in ("k2", "abs"):
            assert estimated.item() == pytest.approx(true.item())  # unbiased as values

    @pytest.mark.parametrize("estimator", ["k2", "k3"])
    def test_a_teachers_gradient_over_all_tokens_is_that_of_the_divergence_itself(self, estimator):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(7, generator=generator, dtype=torch.float64)
        teacher = torch.randn(7, generator=generator, dtype=torch.float64)
        policy_V = logits.requires_grad_().log_softmax(-1)
        teacher_V = teacher.log_softmax(-1)
        term = TeacherTermConfig(place="loss", estimator=estimator)
        ours = (policy_V.exp().detach() * teacher_kl(policy_V, teacher_V, term)).sum()
        reverse = policy_V.exp() * (policy_V - teacher_V)
        forward = teacher_V.exp() * (teacher_V - policy_V)
        theirs = (reverse if estimator == "k2" else forward).sum()
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (1.0, 0.5, 0.0, 0.2, 0.5, 1.0),  # max(1, 0.49) / 2: moving back is not clipped
        (1.0, 0.5, 2.0, 0.2, 0.845, 0.0),  # max(1, 1.69) / 2: it has moved far enough
        (0.6, 0.5, 2.0, 0.2, 0.98, -1.4),  # within the clip
        (1.0, 0.5, 2.0, None, 0.5, -1.0),
    ],
)
def test_the_value_loss_by_hand(value, old, target, clip, loss, slope):
    values_N = tensor(value).requires_grad_()
    result_N = value_loss(values_N, tensor(old), tensor(target), clip)
    result_N.sum().backward()
    assert (result_N.item(), values_N.grad.item()) == pytest.approx((loss, slope))


def test_tiles_are_joined_by_their_sums_and_largest_values():
    tiles = [
        {"tokens": torch.tensor(n), "weight_max": tensor(x)[0], "expert_counts/0": torch.tensor([n, 1])}
        for n, x in ((1, 3.0), (2, 2.0))
    ]
    sums = add_tiles(tiles)
    assert (sums.tokens, sums.weight_max, sums.expert_counts) == (3, 3.0, ((3, 2),))
    assert add_tiles([]).expert_counts == ()


def test_a_sum_that_nothing_else_knows_is_a_metric_by_its_name():
    """Over the 4 tokens that were sampled, not the 6 that were trained; 2 are of a demonstration."""
    sums = Sums(tokens=3, imitation_tokens=2, surprise_sum=3.0, surprise_max=2.0, note=1.0)
    metrics = loss_metrics(sums + Sums(tokens=3, surprise_sum=5.0, surprise_max=7.0))
    assert (metrics["surprise"], metrics["surprise/max"]) == (2.0, 7.0)
    assert not {"note", "loss_sum", "entropy_sum"} & metrics.keys()


def test_the_recipe_for_a_metric_counts_no_token_of_a_demonstration():
    """The line of CONTRIBUTING.md. Surprises log 2, log 4 and a demonstration's log 10: 1.5 log 2."""
    (line,) = re.findall(r'`(sums\["surprise_sum"\] = [^`]+)`', (ROOT / "CONTRIBUTING.md").read_text())
    tokens = make_tokens([0.5, 0.25, 0.1], [0.5, 0.25, 0.1], [1.0] * 3, imitation_N=tensor(0.0, 0.0, 0.5))
    sums = dict(loss_of(tokens).sums)
    exec(line, {"sums": sums, "tokens": tokens, "surprise_N": -tokens.logprobs_N})
    assert not sums["surprise_sum"].requires_grad
    metrics = loss_metrics(Sums(tokens=3) + add_tiles([sums]))
    assert metrics["surprise"] == pytest.approx(1.5 * LOG2)


def test_a_sum_that_no_code_reads_is_no_attribute():
    """Broken, a misspelt name would be a metric of 0."""
    sums = Sums(tokens=3, surprise_sum=1.0)
    assert (sums.tokens, sums.kl_sum, sums["surprise_sum"]) == (3, 0.0, 1.0)
    for name in ("kl_sums", "surprise_sum"):
        with pytest.raises(AttributeError, match=f"no sum '{name}'"):
            getattr(sums, name)


@pytest.mark.parametrize(
    ("normalisation", "weights", "whole", "empty"),
    [
        ("sequence", [0.5, 0.25, 1.0], 2.0, 1.0),
        ("token", [1.0, 1.0, 1.0], 6.0, 0.0),
        ("constant", [1.0, 1.0, 1.0], 20.0, 10.0),
        ("sequence_sum", [1.0, 1.0, 1.0], 2.0, 1.0),
        ("prompt", [1 / 6, 1 / 6, 1.0], 1.0, 0.5),
    ],
)
def test_weights_and_denominators(normalisation, weights, whole, empty):
    """A group of two sequences with 2 and 4 trained tokens, completions of at most 10; and one without any,
    which counts where sequences are counted."""
    assert [token_weight(normalisation, n, 6 if n else 0) for n in (2, 4, 0)] == weights
    assert denominator(normalisation, 2, 6, 10, num_groups=1.0) == whole
    assert denominator(normalisation, 1, 0, 10, num_groups=0.5) == empty
    counts = [(3, 17, 32, 1.0), (1, 0, 32, 0.25), (5, 40, 32, 0.5)]
    assert sum(denominator(normalisation, *numbers) for numbers in counts) == denominator(
        normalisation, 9, 57, 32, 1.75
    )


class TestNoTokenTakesOverAStep:
    """What bounds a single token by default, and what one is worth that is ruled out."""

    def penalty(self, d: float, ratio: float = 1.0, **kl: Any) -> tuple[float, float]:
        """The penalty of one token that is d above its reference, and its gradient."""
        logprobs_N = tensor(-30.0 + d).requires_grad_()
        (penalty_N,) = kl_penalty(logprobs_N, tensor(-30.0), KlConfig(**kl), tensor(ratio))
        penalty_N.backward()
        return penalty_N.item(), logprobs_N.grad.item()

    @pytest.mark.parametrize(
        ("d", "kl", "expected"),
        [
            (-2.0, {}, (math.exp(2) - 3, 1 - math.exp(2))),
            (-10.0, {}, (10.0, 0.0)),  # exp(10) - 1 - 10 = 22015 is beyond 10
            (-10.0, {"bound": None}, (math.exp(10) - 11, 1 - math.exp(10))),
            (-10.0, {"bound": 50.0}, (50.0, 0.0)),
            (15.0, {"bound": None}, (14.0, 1.0)),
            (25.0, {"bound": None}, (19.0, 1.0)),  # k3 is d far above the reference
            (-10.0, {"estimator": "k1"}, (-10.0, -10.0)),
            (-10.0, {"estimator": "k2"}, (50.0, -10.0)),
            (-10.0, {"estimator": "k3+"}, (10.0, -10.0)),
            (-10.0, {"estimator": "corrected_k3"}, (10.0, -10.0)),
            # d = log 2 and a ratio of 50: the gradient stops at the bound, the value does not
            (LOG2, CORRECTED, (50 * (LOG2 - 0.5), 10.0)),
            (LOG2, CORRECTED | {"bound": None}, (50 * (LOG2 - 0.5), 50 * LOG2)),
        ],
        ids=str,
    )  # fmt: skip
    def test_penalties_stop_at_their_bounds(self, d, kl, expected):
        assert self.penalty(d, **kl) == pytest.approx(expected, rel=1e-5, abs=1e-5)

    @pytest.mark.parametrize("estimator", [kind for kind in KINDS if kind != "k3"])
    def test_beyond_20_nats_a_token_keeps_its_gradient(self, estimator):
        for d in (-25.0, 25.0):
            value, gradient = self.penalty(d, estimator=estimator, bound=None)
            assert gradient == pytest.approx(math.copysign(1.0 if estimator == "abs" else 20.0, d))
            assert value == self.penalty(math.copysign(20.0, d), estimator=estimator, bound=None)[0]

    def test_the_rollout_penalty_keeps_its_gradient_beyond_20_nats(self):
        for d, slope in ((LOG2, 2.0 * LOG2), (-25.0, -40.0)):
            logprobs_N = tensor(-30.0 + d).requires_grad_()
            (penalty_N,) = rollout_penalty(logprobs_N, tensor(-30.0))
            penalty_N.backward()
            assert penalty_N.item() == pytest.approx(min(abs(d), 20.0) ** 2)
            assert logprobs_N.grad.item() == pytest.approx(slope)

    @pytest.mark.parametrize(("bound", "expected"), [(10.0, 10.0), (None, math.exp(10) - 11)])
    def test_k3_in_the_reward_stops_at_the_same_bound(self, bound, expected):
        (sample,) = make_samples(1)
        sample.fill("reference_logprobs", sample.rollout_logprobs + 10.0)
        kl = {"place": "reward", "estimator": "k3", "coefficient": 1.0, "bound": bound}
        shaped = shaped_reward(sample, AlgorithmConfig(kl=kl, **FROZEN), max_tokens=100)
        assert shaped == pytest.approx(sample.reward - expected * sample.num_trained, rel=1e-5)

    @pytest.mark.parametrize("loss", ["ppo", "gspo"])
    def test_a_bad_token_that_became_likely_is_bounded_by_default(self, loss):
        # ratio 0.9 / 0.01 = 90 with A = -1: the objective is -3 and has no gradient
        for dual_clip, objective, gradient in (("auto", -3.0, 0.0), (None, -90.0, 90.0)):
            tokens = make_tokens([0.9], [0.01], [-1.0])
            terms = loss_of(tokens, loss=loss, dual_clip=dual_clip, **ROLLOUT)
            terms.loss.backward()
            assert (terms.loss.item(), tokens.logprobs_N.grad.item()) == pytest.approx((-objective, gradient))

    @pytest.mark.parametrize(
        ("fields", "bound"),
        [
            ({}, 3.0),
            ({"clip_high": 5.0}, 6.0),
            ({"dual_clip": 4}, 4.0),
            ({"dual_clip": None}, None),
            ({"loss": "reinforce"}, None),
            ({"loss": "cispo", **ROLLOUT}, None),
        ],
    )
    def test_the_dual_clip_never_cuts_into_the_ordinary_one(self, fields, bound):
        assert AlgorithmConfig(**fields).dual_clip_bound == bound

    @pytest.mark.parametrize("has_proximal", [False, True])
    @pytest.mark.parametrize(
        "fields",
        [
            *LOSSES.values(),
            {"loss": "gspo", **ROLLOUT},
            {"loss": "dppo_tv", "rollout_penalty": 0.1, **ROLLOUT},
            {"importance": {"mode": "mask", "low": 0.5, "high": 5.0}},
            *({"kl": {"place": "loss", "estimator": kind}, **FROZEN} for kind in KINDS),
        ],
        ids=str,
    )
    def test_a_token_that_the_model_rules_out_adds_finite_numbers_and_no_gradient(self, fields, has_proximal):
        def terms_of(probability):
            further = {"proximal_logprobs_N": tensor(probability, 0.3).log()} if has_proximal else {}
            further["reference_logprobs_N"] = tensor(probability, 0.2).log()
            tokens = make_tokens([probability, 0.5], [0.4, 0.4], [-1.0, 1.0], **further)
            terms = loss_of(tokens, **fields)
            terms.loss.backward()
            return tokens.logprobs_N.grad, terms

        gradient_N, terms = terms_of(0.0)
        metrics = add_tiles([terms.sums])
        assert all(map(math.isfinite, metrics.values())), metrics
        assert gradient_N[0].item() == 0.0 and torch.isfinite(gradient_N).all()
        # The ratio, or the weight, may be that of the whole sequence.
        if fields.get("loss") not in ("gspo", "gmpo", "vespo"):
            assert gradient_N[1].item() == pytest.approx(terms_of(0.1)[0][1].item())

    def test_the_gradient_of_the_logits_is_finite_where_one_of_them_is_ruled_out(self):
        logits_NV = torch.tensor([[0.0, -torch.inf, 1.0], [0.5, 0.0, 1.0]], requires_grad=True)
        logprobs_N, _, _ = score_logits(logits_NV, torch.tensor([1, 0]), 1.0)
        tokens = make_tokens([0.5, 0.5], [0.4, 0.4], [-1.0, 1.0], logprobs_N=logprobs_N)
        loss_of(tokens).loss.backward()
        assert torch.isfinite(logits_NV.grad).all()
        assert not logits_NV.grad[0].any() and logits_NV.grad[1].any()

    def test_a_certain_token_has_a_finite_divergence(self):
        logprobs_N = torch.tensor([0.0, -1e-9], requires_grad=True)
        tokens = make_tokens([1.0, 1.0], [0.9, 0.9], [1.0, -1.0], logprobs_N=logprobs_N)
        terms = loss_of(tokens, loss="dppo_kl", **ROLLOUT)
        terms.loss.backward()
        assert torch.isfinite(logprobs_N.grad).all() and terms.sums["clipped_high"].item() == 1

    def test_a_model_that_gives_nan_is_not_hidden(self):
        assert math.isnan(loss_of(make_tokens([np.nan, 0.5], [0.4, 0.4], [-1.0, 1.0])).loss.item())
