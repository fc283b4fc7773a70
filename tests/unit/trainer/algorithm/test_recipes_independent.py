"""Whole recipes, from rewards to gradients, against the papers' objectives written a second time in torch.

Two prompts with three and two completions of unequal lengths; logprobs of the policy and of the rollout are
made up, in float32.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.losses.policy_loss import policy_loss
from tidemill.services.trainer.algorithm.losses.surrogates import find_loss
from tidemill.services.trainer.algorithm.losses.tokens import Tokens, denominator, token_weight
from tidemill.services.trainer.groups.group_filter import GroupFilter, PendingGroup, TrainableGroup
from tidemill.services.trainer.groups.samples import MicroBatch, Sample

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
    given, group_filter = made_up(), GroupFilter(config)
    logprobs = iter(given.rollout)
    groups = []
    for ticket, lengths in enumerate(LENGTHS):
        source = PendingGroup(ticket, 0)
        for index, length in enumerate(lengths):
            ids = np.arange(length, dtype=np.int32)
            source.trajectories[index] = make_trajectory(
                ticket, index, group_size=3, completion_ids=ids, logprobs=next(logprobs)
            )
            source.scores[index] = make_score(ticket, index, REWARDS[ticket][index])
        groups.append(group_filter.apply(source, 0))
    assert all(isinstance(group, TrainableGroup) for group in groups)
    samples = [s for group in Advantages(config).assign(groups) for s in group.samples]  # type: ignore[arg-type]
    return loss_of(samples, given.current, config.trainer.algorithm)


def loss_of(samples: list[Sample], current: list[np.ndarray], algorithm: Any) -> tuple[float, np.ndarray]:
    counts = [sample.num_trained for sample in samples]
    batch, kind = MicroBatch(tuple(samples)), algorithm.normalisation
    weights = [token_weight(kind, s.num_trained, s.group_trained) for s in samples]
    logprobs_N = torch.tensor(np.concatenate(current), requires_grad=True)
    tokens = Tokens(
        logprobs_N=logprobs_N,
        rollout_logprobs_N=torch.tensor(np.concatenate([s.rollout_logprobs for s in samples])),
        advantages_N=torch.tensor(np.repeat([s.advantage for s in samples], counts), dtype=torch.float32),
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
    given = made_up()
    current = [torch.tensor(values, requires_grad=True) for values in given.current]
    rollout = [torch.tensor(values) for values in given.rollout]
    rewards = [torch.tensor(group) for group in REWARDS]
    loss = FORMULAS[name](current, rollout, rewards)
    loss.backward()
    return loss.item(), np.concatenate([values.grad.numpy() for values in current])


def scalerl(current: list, rollout: list, rewards: list) -> torch.Tensor:
    """-1/P sum_p 1/sum|y| sum_i sum_t sg(min(rho, 5)) A_i / std(A) log pi. arXiv 2510.13786."""
    centred = torch.cat([group - group.mean() for group in rewards])
    advantages = centred / (centred.std() + 1e-4)
    total, number = torch.zeros(()), 0
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


@pytest.mark.parametrize("name", FORMULAS)
def test_a_recipe_is_its_papers_objective_in_value_and_gradient(name):
    loss, gradient = ours(preset=name)
    expected_loss, expected_gradient = reference(name)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3
