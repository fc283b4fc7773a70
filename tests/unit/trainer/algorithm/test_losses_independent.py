"""The losses against their papers' formulas, written again in float64: the same values and gradients. Those
that TRL has too are held against TRL itself (tests/integration/trainer/test_losses_of_trl.py).

`of` is a sequence: logprobs `now` (with gradient), `old`, `proximal`, `rollout`, `reference` of its tokens.
Then statistics of a mini-batch, by hand and over the whole batch; and recipes, from rewards to gradients.
"""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.example_algorithms import scale_rl_settings
from tests.support.losses import (
    MAX_COMPLETION,
    check_formula,
    our_loss,
    probable_rectangle,
    rectangle,
    with_statistics,
    written_out,
)
from tests.support.models import masked
from tests.support.samples import assigned, changed
from tests.support.training import make_score, plain_sample, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithms.table import LOSSES
from tidemill.common.config.algorithms.with_settings.covariance import token_covariances
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.losses.mini_batch import (
    fill_statistics,
    mean_weight,
    start_tokens,
    top_entropy,
)
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss, policy_loss
from tidemill.services.trainer.algorithm.losses.tokens import Tokens, denominator, token_weight
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import GroupFilter
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample

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
        p = math.exp(now.item())
        q = math.exp(old.item())
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


def with_gradient_of(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return value.detach() + source - source.detach()


OFF: dict[str, Any] = {"importance": {"mode": "off"}}


CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "kl k1": kl("k1", lambda of: with_gradient_of(of.now - of.reference, k2(of))),
    "kl k2": kl("k2", k2),
    "kl k3+": kl("k3+", lambda of: with_gradient_of(k3(of), k2(of))),
    "kl abs": kl("abs", lambda of: (of.now - of.reference).abs()),
    "dppo_tv": ({"loss": "dppo_tv", "clip_low": 0.1, "clip_high": 0.15, **OFF}, lambda of: dppo(of, "tv",
        0.1, 0.15)),
    "dppo_tv with a bound": ({"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2,
        "dppo": {"max_ratio": 1.2}, **OFF}, lambda of: dppo(of, "tv", 0.2, 0.2, 1.2)),
    "dppo_kl": ({"loss": "dppo_kl", "clip_low": 0.02, "clip_high": 0.05, **OFF}, lambda of: dppo(of, "kl",
        0.02, 0.05)),
    "prime-rl's default": ({"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "rollout_penalty": 0.3,
        **OFF}, lambda of: dppo(of, "tv", 0.2, 0.2) + 0.3 * (of.now - of.rollout) ** 2),
}  # fmt: skip


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

    def gpg(of):
        return -of.advantage * of.now

    check_formula(AlgorithmConfig(loss="reinforce", **OFF), gpg, has_proximal)

    def reinforce(of):
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
    total_out = 0
    level = algorithm.importance.level

    def formula(of):
        nonlocal total_out
        is_out = torch.tensor(rejected((of.proximal - of.rollout).tolist(), algorithm.rejection))
        total_out += int(is_out.sum())
        of.num_kept -= int(is_out.sum()) if denominator == "kept" else 0
        is_off = algorithm.importance_mode == "off"
        return (plain if is_off else weighted(level, plain))(of) * ~is_out

    num_tokens = 0
    for seed in range(4):
        data = probable_rectangle(seed)
        before = total_out
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
        current_BT = torch.tensor(data.current, requires_grad=True)
        mask_BT = torch.tensor(data.mask)
        losses_BT = -torch.tensor(data.advantages)[:, None] * current_BT * mask_BT
        loss = losses_BT.sum() / MAX_COMPLETION / (len(mask_BT) if divides else 1)
        loss.backward()
        assert ours == pytest.approx(factor * loss.item(), abs=1e-5)
        np.testing.assert_allclose(our_gradient_BT, factor * current_BT.grad.numpy(), atol=1e-6)


def sample_of(index: int, start: list[float], rollout: list[float], advantage: float = 0.0) -> Sample:
    """By the probabilities of its tokens at the start of the step and at the rollout."""
    logprobs = {"rollout_logprobs": np.log(rollout), "start_logprobs": np.log(start)}
    fields = {name: values.astype(np.float32) for name, values in logprobs.items()}
    return plain_sample(0, index, 0.0, len(start), advantage=advantage, **fields)


def test_the_tokens_with_the_highest_entropy_stay():
    # The quantile 0.5 of 0, 1, 2, 3 is 1.5, that of 0.75 is 2.25
    entropies = np.array([3.0, 0.0, 2.0, 1.0])
    assert top_entropy(entropies, 0.5).tolist() == [True, False, True, False]
    assert top_entropy(entropies, 0.25).tolist() == [True, False, False, False]
    assert top_entropy(np.ones(3), 0.2).all(), "equal ones are at the quantile"
    assert not len(top_entropy(np.zeros(0), 0.2))


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        ("token", (0.5 + 1.5 + 2.0) / 3),  # 0.5, 1.5, and 4 truncated to 2
        ("sequence", (0.75 + 2.0) / 2),  # the product of the first two, and 2
        ("geometric", (math.sqrt(0.75) + 2.0) / 2),
    ],
)
def test_the_mean_of_truncated_weights_by_hand(level, mean):
    samples = [sample_of(0, [0.2, 0.6], [0.4, 0.4]), sample_of(1, [0.8], [0.2])]
    algorithm = AlgorithmConfig(importance={"level": level, "normalise": True})
    assert mean_weight(samples, algorithm) == pytest.approx(mean)
    assert mean_weight([*samples, masked(sample_of(2, [0.9], [0.1]))], algorithm) == pytest.approx(mean)
    assert mean_weight([masked(samples[0])], algorithm) == 1.0


def test_covariances_and_what_is_chosen_by_hand():
    # Logprobs -1, -3 with A = 1 and -2, -2 with A = -1: means -2 and 0
    samples = [
        sample_of(0, [math.exp(-1), math.exp(-3)], [0.5, 0.5], 1.0),
        sample_of(1, [math.exp(-2)] * 2, [0.5, 0.5], -1.0),
    ]
    kl_cov = AlgorithmConfig(loss="kl_cov", covariance={"share": 0.5}, **ROLLOUT)
    np.testing.assert_allclose(
        token_covariances(start_tokens(samples, kl_cov)), [1.0, -1.0, 0.0, 0.0], atol=1e-6
    )
    assert chosen(samples, kl_cov) == [True, False, True, False], "2 of 4, the first of equal"
    fields = {"loss": "clip_cov", "covariance": {"share": 0.01, "low": -0.5, "high": 0.5}}
    of_all = chosen(samples, AlgorithmConfig(**fields))
    assert sum(of_all) == 1 and any(of_all[2:]), "one of the two inside, the share rounds to none"
    # The third has A < 0 and the ratio 0.14 / 0.5, below the clip; the last 0.14 / 0.14
    samples[1] = sample_of(1, [math.exp(-2)] * 2, [0.5, math.exp(-2)], -1.0)
    assert chosen(samples, AlgorithmConfig(**fields, **ROLLOUT)) == [False, False, False, True]


def chosen(samples: list[Sample], algorithm: AlgorithmConfig) -> list[bool]:
    """Whether the loss chooses each trained token of a mini-batch."""
    ratio = start_tokens(samples, algorithm)
    loss = LOSSES[algorithm.loss]
    positions = [(sample.key, index) for sample in samples for index in range(len(sample.mask))]
    assert loss.choose is not None
    indices = loss.choose(ratio, loss.surrogate(ratio, algorithm), positions, algorithm)
    return [index in indices for index in range(len(positions))]


def samples_of(data: SimpleNamespace) -> list[Sample]:
    """The sequences of a rectangle, whose current policy is that at the step's start."""
    names = {
        "mask": data.mask,
        "rollout_logprobs": data.rollout,
        "start_logprobs": data.current,
        "entropies": data.entropies,
    }
    samples = []
    for b, advantage in enumerate(data.advantages.tolist()):
        columns = {name: values_BT[b] for name, values_BT in names.items()}
        samples.append(plain_sample(0, b, 0.0, data.mask.shape[1], advantage=advantage, **columns))
    return samples


def statistics_of(samples: list[Sample]) -> dict[str, np.ndarray]:
    names = [name for name in ("factors", "penalised") if name in samples[0].columns]
    statistics = {}
    for name in names:
        statistics[name] = np.stack([sample.columns[name] for sample in samples])
    return statistics


STATISTICS: dict[str, dict[str, Any]] = {
    "top entropy": {"top_entropy_quantile": 0.3, "importance": {"mode": "off"}},
    "normalised weights": {"importance": {"normalise": True}},
    "normalised weights of sequences": {"importance": {"level": "sequence", "high": 3.0, "normalise": True}},
    "clip_cov": {"loss": "clip_cov", "covariance": {"share": 0.99, "low": 0.1, "high": 2.0}, **ROLLOUT},
    "kl_cov": {"loss": "kl_cov", "covariance": {"share": 0.3, "coefficient": 0.7}, **ROLLOUT},
}


def whole_batch(data: SimpleNamespace, algorithm: AlgorithmConfig) -> tuple[float, np.ndarray]:
    """The papers' losses over all tokens at once, in float64; normalised by token."""
    now_BT = torch.tensor(data.current, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor(data.mask)
    counts = data.mask.sum(1)
    now = now_BT[mask_BT]
    rollout = torch.tensor(data.rollout).double()[mask_BT]
    advantages = torch.tensor(np.repeat(data.advantages, counts)).double()
    sequence = torch.tensor(np.repeat(np.arange(4), counts))
    ratio = (now - (rollout if algorithm.old_logprobs == "rollout" else now.detach())).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    covariance = ((advantages - advantages.mean()) * (now - now.mean())).detach()
    if algorithm.loss == "clip_cov":
        bounds = algorithm.covariance
        is_free = clipped == ratio * advantages
        inside = (covariance > bounds.low) & (covariance < bounds.high) & is_free
        losses = -clipped * (~inside)
    elif algorithm.loss == "kl_cov":
        chosen = covariance.topk(int(0.3 * len(now))).indices
        losses = -ratio * advantages
        losses[chosen] = losses[chosen] + 0.7 * (now - rollout).abs()[chosen]
    elif algorithm.top_entropy_quantile < 1.0:
        entropies = torch.tensor(data.entropies).double()[mask_BT]
        losses = -ratio * advantages * (entropies >= entropies.quantile(0.7))
    else:
        importance = algorithm.importance
        logs = (now - rollout).detach()
        if importance.level == "sequence":
            sums = torch.stack([logs[sequence == s].sum() for s in range(3)])
            weights = sums.exp().clamp(max=importance.high)
            weights = (weights / weights.mean())[sequence]
        else:
            weights = logs.exp().clamp(max=importance.high)
            weights = weights / weights.mean()
        losses = -weights * ratio * advantages
    loss = losses.mean()
    loss.backward()
    assert now_BT.grad is not None
    return loss.item(), now_BT.grad.numpy()


@pytest.mark.parametrize("case", STATISTICS)
def test_equals_the_formula_over_the_whole_batch_in_value_and_gradient(case):
    algorithm = AlgorithmConfig(**STATISTICS[case])
    for seed in range(4):
        data = probable_rectangle(seed)
        statistics = statistics_of(with_statistics(samples_of(data), algorithm))
        ours, our_gradient_BT, _ = our_loss(data, algorithm, **statistics)
        theirs, their_gradient_BT = whole_batch(data, algorithm)
        assert ours == pytest.approx(theirs, abs=1e-6)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)


@pytest.mark.parametrize("case", STATISTICS)
def test_depends_neither_on_the_order_nor_on_what_is_not_trained(case):
    algorithm = AlgorithmConfig(**STATISTICS[case])
    samples = samples_of(probable_rectangle(0))
    plain = {sample.key: sample for sample in with_statistics(samples, algorithm)}
    mixed = [samples[2], masked(sample_of(9, [0.9], [0.1], 5.0)), samples[0], samples[3], samples[1]]
    if algorithm.needs_start_entropies:
        mixed[1] = changed(mixed[1], entropies=np.ones(1, np.float32))
    for sample in with_statistics(mixed, algorithm):
        if sample.key in plain:
            expected = plain[sample.key].columns
            assert sample.columns.keys() == expected.keys()
            for name in ("factors", "penalised"):
                np.testing.assert_array_equal(sample.columns.get(name), expected.get(name))
        assert not {"start_logprobs", "entropies"} & sample.columns.keys()


def test_an_algorithm_without_statistics_leaves_samples_as_they_are():
    samples = samples_of(probable_rectangle(0))
    group = Group(0, samples=list(samples), precomputed_for=3)
    before = [copy.deepcopy(sample.columns) for sample in samples]
    arrays = [dict(sample.columns) for sample in samples]
    fill_statistics([group], AlgorithmConfig())
    assert group.precomputed_for == 3
    for sample, same, columns, held in zip(group.samples, samples, before, arrays, strict=True):
        assert sample is same and sample.columns.keys() == columns.keys()
        for name, values_T in columns.items():
            assert sample.columns[name] is held[name]
            np.testing.assert_array_equal(sample.columns[name], values_T)


LENGTHS = [[3, 7, 5], [2, 6]]
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0]]
MAX_TOKENS = 8


def made_up() -> SimpleNamespace:
    rng = np.random.default_rng(11)
    counts = [length for group in LENGTHS for length in group]
    rollout = [rng.normal(-1.5, 0.5, count).astype(np.float32) for count in counts]
    current = [values + rng.normal(0.0, 0.3, len(values)).astype(np.float32) for values in rollout]
    return SimpleNamespace(rollout=rollout, current=current)


def ours(**algorithm: Any) -> tuple[float, np.ndarray]:
    """Loss and gradient as the trainer has them: filter, advantages, normalisation, surrogate."""
    config = trainer_config(algorithm=algorithm, group_size=3, rollout__sampling={"max_tokens": MAX_TOKENS})
    data = made_up()
    group_filter = GroupFilter(config)
    logprobs = iter(data.rollout)
    groups = []
    for ticket, lengths in enumerate(LENGTHS):
        source = Group(ticket, 0)
        for index, length in enumerate(lengths):
            ids = np.arange(length, dtype=np.int32)
            source.trajectories[index] = make_trajectory(
                ticket, index, group_size=3, completion_ids=ids, logprobs=next(logprobs)
            )
            source.scores[index] = make_score(ticket, index, REWARDS[ticket][index])
        assert group_filter.apply(source, 0) is None
        groups.append(source)
    samples = [sample for group in assigned(Advantages(config), *groups) for sample in group.samples]
    return loss_of(samples, data.current, config.trainer.algorithm)


def loss_of(samples: list[Sample], current: list[np.ndarray], algorithm: Any) -> tuple[float, np.ndarray]:
    counts = [sample.num_trained for sample in samples]
    batch = MicroBatch(tuple(samples))
    kind = algorithm.normalisation
    weights = [token_weight(kind, s.num_trained, s.group_trained) for s in samples]
    logprobs_N = torch.tensor(np.concatenate(current), requires_grad=True)
    tokens = Tokens(
        logprobs_N=logprobs_N,
        columns={
            "rollout_logprobs": torch.tensor(np.concatenate([s.rollout_logprobs for s in samples])),
            "advantages": torch.tensor(
                np.repeat([s.advantage for s in samples], counts), dtype=torch.float32
            ),
        },
        weights_N=torch.tensor(np.repeat(weights, counts), dtype=torch.float32),
        sequence_N=torch.tensor(np.repeat(np.arange(len(samples)), counts)),
        num_sequences=len(samples),
        entropies_N=torch.zeros(sum(counts)),
    )
    total, _ = policy_loss(tokens, algorithm, find_loss(algorithm))
    loss = total / denominator(kind, len(samples), sum(counts), MAX_TOKENS, batch.num_groups)
    loss.backward()
    assert logprobs_N.grad is not None
    return loss.item(), logprobs_N.grad.numpy()


def reference(name: str) -> tuple[float, np.ndarray]:
    data = made_up()
    current = [torch.tensor(values, requires_grad=True) for values in data.current]
    rollout = [torch.tensor(values) for values in data.rollout]
    rewards = [torch.tensor(group) for group in REWARDS]
    loss = FORMULAS[name](current, rollout, rewards)
    loss.backward()
    return loss.item(), np.concatenate([values.grad.numpy() for values in current])


def scalerl(current: list, rollout: list, rewards: list) -> torch.Tensor:
    """-1/P sum_p 1/sum|y| sum_i sum_t sg(min(rho, 5)) A_i / std(A) log pi. arXiv 2510.13786."""
    centred = torch.cat([group - group.mean() for group in rewards])
    advantages = centred / (centred.std() + 1e-4)
    total = torch.zeros(())
    number = 0
    for group in LENGTHS:
        objective = torch.zeros(())
        for _ in group:
            rho = (current[number] - rollout[number]).exp().detach().clamp(max=5.0)
            objective = objective + (rho * advantages[number] * current[number]).sum()
            number += 1
        total = total + objective / sum(group)
    return -total / len(LENGTHS)


def luspo(current: list, rollout: list, rewards: list) -> torch.Tensor:
    """-1/N sum_i |y_i| min(s_i A_i, clip(s_i) A_i), s_i the geometric mean. arXiv 2602.05261, TRL's loss."""
    advantages = torch.cat([(group - group.mean()) / (group.std() + 1e-4) for group in rewards])
    total = torch.zeros(())
    for now, then, advantage in zip(current, rollout, advantages, strict=True):
        s = (now - then).mean().exp()
        clipped = s.clamp(1 - 2e-3, 1 + 2.5e-3)
        total = total + len(now) * torch.minimum(s * advantage, clipped * advantage)
    return -total / len(current)


def max_rl(current: list, rollout: list, rewards: list) -> torch.Tensor:
    """-1/(N max) sum_i w_it (r_i - mean) / mean sum_t log pi, with importance weights up to 2."""
    advantages = torch.cat([(group - group.mean()) / group.mean() for group in rewards])
    total = torch.zeros(())
    for now, then, advantage in zip(current, rollout, advantages, strict=True):
        weights = (now - then).exp().detach().clamp(max=2.0)
        total = total + (weights * advantage * now).sum()
    return -total / (len(current) * MAX_TOKENS)


FORMULAS = {"scalerl": scalerl, "luspo": luspo, "max_rl": max_rl}
RECIPES = {"scalerl": scale_rl_settings(), "luspo": {"preset": "luspo"}, "max_rl": {"preset": "max_rl"}}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_recipe_is_its_papers_objective_in_value_and_gradient(name):
    loss, gradient = ours(**RECIPES[name])
    expected_loss, expected_gradient = reference(name)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3
