"""Losses on rectangles [B, T] of made-up logprobs, without a model."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.samples import changed
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses import mini_batch
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss, policy_loss
from tidemill.services.trainer.algorithm.losses.sums import TileSums
from tidemill.services.trainer.algorithm.losses.tokens import Tokens, denominator, token_weight
from tidemill.services.trainer.groups.columns import trained_names
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample

MAX_COMPLETION = 8


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_tokens(
    probabilities: list[float], rollout: list[float], advantages: list[float], **fields: Any
) -> Tokens:
    """Tokens of one sequence by their probabilities; the logprobs carry the gradient."""
    logprobs_N = tensor(*probabilities).log().requires_grad_()
    columns = {"rollout_logprobs": tensor(*rollout).log(), "advantages": tensor(*advantages)}
    if "old_values_N" in fields:
        columns["values"] = fields.pop("old_values_N")
    for name in trained_names():
        if f"{name}_N" in fields and name != "values":  # those are the current ones
            columns[name] = fields.pop(f"{name}_N")
    values: dict[str, Any] = {
        "logprobs_N": logprobs_N,
        "columns": columns,
        "weights_N": torch.ones_like(logprobs_N),
        "sequence_N": torch.zeros(len(probabilities), dtype=torch.long),
        "num_sequences": 1,
        "entropies_N": torch.zeros_like(logprobs_N),
    }
    return Tokens(**(values | fields))


class LossTerms(NamedTuple):
    """What `policy_loss` returns."""

    loss: torch.Tensor
    sums: TileSums


def loss_of(tokens: Tokens, **algorithm: Any) -> LossTerms:
    config = AlgorithmConfig(**algorithm)
    return LossTerms(*policy_loss(tokens, config, find_loss(config)))


def rectangle(seed: int) -> SimpleNamespace:
    """Random logprobs of 4 sequences; masks of 7, 5, 1 and 0 tokens."""
    rng = np.random.default_rng(seed)
    mask_BT = np.arange(MAX_COMPLETION)[None] < np.array([8, 5, 1, 0])[:, None]
    mask_BT[0, 3] = False

    def logprobs() -> np.ndarray:
        return rng.normal(-1.5, 0.6, mask_BT.shape).astype(np.float32)

    return SimpleNamespace(
        current=logprobs(),
        rollout=logprobs(),
        advantages=rng.normal(size=4).astype(np.float32),
        mask=mask_BT,
        proximal=logprobs(),
        reference=logprobs(),
        entropies=rng.random(mask_BT.shape).astype(np.float32),
    )


def our_loss(
    data: SimpleNamespace, algorithm: AlgorithmConfig, has_proximal: bool = False, **statistics: np.ndarray
) -> tuple[float, np.ndarray, LossTerms]:
    """Loss divided by its denominator, its gradient [B, T], and the terms. `statistics` [B, T] are what the
    mini-batch gives its tokens."""
    current_BT = torch.tensor(data.current, requires_grad=True)
    mask_BT = torch.tensor(data.mask)
    counts = data.mask.sum(1)
    weights = [token_weight(algorithm.normalisation, int(count)) for count in counts]
    columns = {
        "rollout_logprobs": torch.tensor(data.rollout)[mask_BT],
        "advantages": torch.tensor(np.repeat(data.advantages, counts)),
    }
    if has_proximal:
        columns["proximal_logprobs"] = torch.tensor(data.proximal)[mask_BT]
    if algorithm.needs_reference:
        columns["reference_logprobs"] = torch.tensor(data.reference)[mask_BT]
    columns |= {name: torch.tensor(values)[mask_BT].float() for name, values in statistics.items()}
    tokens = Tokens(
        logprobs_N=current_BT[mask_BT],
        columns=columns,
        weights_N=torch.tensor(np.repeat(weights, counts), dtype=torch.float32),
        sequence_N=torch.tensor(np.repeat(np.arange(len(counts)), counts)),
        num_sequences=len(counts),
        entropies_N=torch.tensor(data.entropies)[mask_BT],
    )
    terms = LossTerms(*policy_loss(tokens, algorithm, find_loss(algorithm)))
    num_trained = int(counts.sum())
    if algorithm.rejection.denominator == "kept":
        num_trained -= int(terms.sums["rejected"])
    size = denominator(algorithm.normalisation, len(counts), num_trained, MAX_COMPLETION)
    (terms.loss / size).backward()
    assert current_BT.grad is not None
    return terms.loss.item() / size, current_BT.grad.numpy(), terms


def with_statistics(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[Sample]:
    """The samples as one mini-batch, with the values that its statistics give them."""
    group = Group(0, samples=[changed(sample) for sample in samples])
    mini_batch.fill_statistics([group], algorithm)
    return group.samples


def probable_rectangle(seed: int) -> SimpleNamespace:
    """Like `rectangle`, with logprobs of probabilities from 0.02 to 0.98, all near the same ones."""
    data = rectangle(seed)
    rng = np.random.default_rng(seed + 100)

    def near(logits: np.ndarray) -> np.ndarray:
        return (-np.log1p(np.exp(-(logits + rng.normal(0.0, 0.8, logits.shape))))).astype(np.float32)

    logits = rng.normal(0.0, 1.2, data.mask.shape)
    data.current = near(logits)
    data.rollout = near(logits)
    data.proximal = near(logits)
    data.reference = near(logits)
    return data


SequenceLoss = Callable[[SimpleNamespace], torch.Tensor]
"""From one sequence's tokens (float64: `now` with gradient, `old`, `proximal`, `rollout`, `reference`,
`entropies`, `advantage`) to the loss of each of them. It may lower `num_kept`, which the mean is over."""


def written_out(
    data: SimpleNamespace, algorithm: AlgorithmConfig, has_proximal: bool, loss_of_sequence: SequenceLoss
) -> tuple[float, np.ndarray, int]:
    """Loss and gradient of a formula, sequence by sequence in float64, for comparison with `our_loss`; and
    how many tokens it left out of `num_kept`."""
    now_BT = torch.tensor(data.current, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    num_kept = 0
    for b, advantage in enumerate(data.advantages):
        positions = np.flatnonzero(data.mask[b])
        if not len(positions):
            continue
        fields = {
            name: tensor(*getattr(data, name)[b, positions]) for name in ("rollout", "reference", "entropies")
        }
        now = now_BT[b, positions]
        proximal = tensor(*data.proximal[b, positions]) if has_proximal else now.detach()
        old = fields["rollout"] if algorithm.old_logprobs == "rollout" else proximal
        of = SimpleNamespace(now=now, old=old, proximal=proximal, advantage=float(advantage), **fields)
        of.num_kept = len(positions)
        loss_T = loss_of_sequence(of)
        is_mean = algorithm.normalisation == "sequence"
        total = total + loss_T.sum() / (max(of.num_kept, 1) if is_mean else 1)
        num_kept = num_kept + of.num_kept
    size = {"token": num_kept, "constant": len(data.mask) * MAX_COMPLETION}
    total = total / size.get(algorithm.normalisation, len(data.mask))
    total.backward()
    assert now_BT.grad is not None
    return total.item(), now_BT.grad.numpy(), int(data.mask.sum()) - num_kept


def check_formula(
    algorithm: AlgorithmConfig, formula: SequenceLoss, has_proximal: bool = True, seeds: int = 3
) -> None:
    """Our loss is the formula's, in value and gradient."""
    largest = 0.0
    for seed in range(seeds):
        data = probable_rectangle(seed)
        ours, our_gradient_BT, _ = our_loss(data, algorithm, has_proximal)
        theirs, their_gradient_BT, _ = written_out(data, algorithm, has_proximal, formula)
        assert abs(ours - theirs) < 1e-6
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)
        largest = max(largest, float(np.abs(their_gradient_BT).max()))
    assert largest > 1e-2
