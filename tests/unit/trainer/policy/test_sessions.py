"""Training on sessions: by hand from the wire, row by row, and whatever the split and the layout."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import (
    MAX_COMPLETION,
    accumulate_all,
    attend_as_varlen,
    gradients_of,
    logprobs_of,
    make_policy,
    make_samples,
    one_batch,
    tiny_llama,
)
from tests.support.samples import changed, taught
from tests.support.sessions import make_segment, make_session, rows_by_hand, session_samples
from tests.support.training import make_score, trainer_config
from tidemill.common.config.algorithm_sections import TeacherTermConfig
from tidemill.common.wire.messages import Trajectory
from tidemill.services.trainer.algorithm.advantages.teacher import add_teacher
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import GroupFilter
from tidemill.services.trainer.groups.sample import Sample, make_sample, num_sampled
from tidemill.services.trainer.policy.packing import make_rows, plan_tiles
from tidemill.services.trainer.policy.tile import lay_out

NORMALISATIONS = ["sequence", "token", "constant"]
TWO_TURNS = make_session(0, 0, make_segment((3, 4, 5), (6, 7), (8, 9, 10), (11, 12, 13)))
FORKED = make_session(
    0, 1, make_segment((3, 4), (6,), (8, 9), (11, 12)), make_segment((14, 15, 16), (17, 18), (19,))
)
ADVANTAGES = (0.75, -1.25)


def samples_of(*trajectories: Trajectory) -> list[Sample]:
    return [
        changed(make_sample(trajectory), advantage=advantage)
        for trajectory, advantage in zip(trajectories, ADVANTAGES, strict=False)
    ]


def logprobs_by_hand(model: Any, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the model's tokens, one row of the wire after the other: current ones, and the rollout's."""
    current = []
    for ids, positions in rows_by_hand(trajectory):
        logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        current += [logprobs[position - 1, ids[position]] for position in positions]
    rollout = [value for s in trajectory.segments for value in s.logprobs[s.mask].tolist()]
    return torch.stack(current), torch.tensor(rollout).double()


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_loss_and_gradient_are_those_written_out_row_by_row(normalisation, old_logprobs):
    """A session of two turns, and one with a fork whose two rows share one advantage and one count."""
    algorithm = {"normalisation": normalisation, "old_logprobs": old_logprobs}
    policy = make_policy(torch.float64, algorithm=algorithm)
    metrics = accumulate_all(policy, [one_batch(samples_of(TWO_TURNS, FORKED))])

    model = tiny_llama().double()
    losses = []
    counts = []
    for trajectory, advantage in zip((TWO_TURNS, FORKED), ADVANTAGES, strict=True):
        current, rollout = logprobs_by_hand(model, trajectory)
        ratio = (current - rollout).exp()
        if old_logprobs == "recompute":  # its value counts the ratio to the current logprobs, which is 1
            weight = ratio.detach().clamp(max=2.0) * advantage
            objective = weight * (current - current.detach()).exp()
        else:
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if advantage < 0:
                objective = torch.maximum(objective, torch.tensor(3.0 * advantage).double())
        counts.append(len(current))
        losses.append(-objective.sum() / (len(current) if normalisation == "sequence" else 1))
    loss = sum(losses)
    loss.backward()
    size = {"sequence": 2, "token": sum(counts), "constant": 2 * MAX_COMPLETION}[normalisation]
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert counts == [5, 5]
    assert (metrics.sequences, metrics.tokens, metrics.denominator) == (2, 10, size)
    assert metrics.loss_sum == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(gradients_of(policy), expected, rtol=1e-6, atol=1e-6)


TEACHING: dict[str, dict[str, Any]] = {
    "reward": {"gamma": 0.0},
    "loss": {"place": "loss", "estimator": "k3", "clip": 3.0},
}


@pytest.mark.parametrize("where", TEACHING)
def test_a_teacher_scores_each_row_of_a_session_as_written_out(where):
    """A fork's rows share nothing but their sample."""
    weight = 0.7
    term = TeacherTermConfig(**TEACHING[where])
    model = tiny_llama().double()
    teacher = tiny_llama(seed=9).double()
    samples = []
    loss = torch.zeros(()).double()
    for trajectory in (TWO_TURNS, FORKED):
        student, _ = logprobs_by_hand(model, trajectory)
        wise, _ = logprobs_by_hand(teacher, trajectory)
        wise = wise.detach().float()
        # On policy: the rollout's logprobs are the policy's own, so that every importance weight is 1.
        sample = make_sample(trajectory)
        rollout = np.zeros(len(sample.mask), np.float32)
        rollout[sample.mask] = student.detach().float().numpy()
        sample = taught(sample, wise.numpy(), weight, rollout_logprobs=rollout, advantage=0.0)
        add_teacher(sample, term)
        samples.append(sample)
        if where == "reward":
            d = (student.detach().float().double() - wise.double()).clamp(-term.clip, term.clip)
            loss = loss + (weight * d * (student - student.detach()).exp()).sum()
        else:
            d = (student.detach() - wise.double()).clamp(-term.clip, term.clip)
            loss = loss + (weight * (1 - torch.exp(-d)) * student).sum()
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    algorithm = {"teacher": TEACHING[where], "loss": "reinforce", "normalisation": "constant"}
    policy = make_policy(torch.float64, algorithm=algorithm)
    assert accumulate_all(policy, form_micro_batches(samples, 12)).denominator == 2 * MAX_COMPLETION
    assert ((gradients_of(policy) - expected).norm() / expected.norm()).item() < 1e-5


def test_a_ratio_of_a_sequence_is_over_all_segments_of_a_session():
    algorithm = {"preset": "gspo", "clip_low": 1.0, "clip_high": 50.0, "dual_clip": None}
    policy = make_policy(torch.float64, micro_batch_tokens=16, algorithm=algorithm)
    accumulate_all(policy, [one_batch(samples_of(TWO_TURNS, FORKED))])
    model = tiny_llama().double()
    loss = torch.zeros(()).double()
    for trajectory, advantage in zip((TWO_TURNS, FORKED), ADVANTAGES, strict=True):
        current, rollout = logprobs_by_hand(model, trajectory)
        loss = loss - (current - rollout).mean().exp() * advantage
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(gradients_of(policy), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"normalisation": normalisation} for normalisation in NORMALISATIONS),
        {"preset": "gspo", "clip_low": 0.5, "clip_high": 5.0},
        {"importance": {"mode": "truncate", "level": "geometric", "high": 2.0}},
        {"off_policy_threshold": 0.1},
        {"loss": "gmpo", "old_logprobs": "rollout", "normalisation": "sequence_sum"},
        {"rejection": {"bounds": {"seq_mean_k1": 1.5}, "denominator": "kept"}, "normalisation": "sequence"},
    ],
)
def test_the_gradient_depends_neither_on_the_split_nor_on_the_layout(algorithm):
    samples = [*session_samples(6), *make_samples(4)]
    splits = [[one_batch(samples)], [one_batch([s]) for s in samples], form_micro_batches(samples, 60)]
    whole: torch.Tensor | None = None
    policy = make_policy(torch.float64, micro_batch_tokens=40, algorithm=algorithm)
    for layout in ("padded", "tree", "varlen"):
        policy.layout = layout
        if layout == "varlen":
            attend_as_varlen(policy._model)
        for split in splits:
            policy.zero()
            metrics = accumulate_all(policy, split)
            gradient = gradients_of(policy) / metrics.denominator
            whole = gradient if whole is None else whole
            assert metrics.sequences == 10
            assert ((gradient - whole).norm() / whole.norm()).item() < 1e-6


@pytest.mark.parametrize("layout", ["padded", "tree", "varlen"])
@pytest.mark.parametrize("keeps_samples", [False, True])
def test_every_segment_is_one_row_and_a_whole_session_one_tile_where_that_matters(layout, keeps_samples):
    samples = session_samples(12)
    rows = make_rows(samples, [sample.mask for sample in samples])
    tiles = [*map(lay_out, plan_tiles(rows, layout, 40, keeps_samples))]
    placed = [(row.sample, int(position)) for tile in tiles for row in tile.rows for position in row.places]
    trained = [(i, int(position)) for i, s in enumerate(samples) for position in np.flatnonzero(s.mask)]
    assert sorted(placed) == trained
    assert len(rows) == sum(len(sample.segments) for sample in samples)
    for tile in tiles:
        targets = [samples[row.sample].completion_ids[row.places] for row in tile.rows]
        assert tile.targets_N.tolist() == np.concatenate(targets).tolist()
    if keeps_samples:
        for i in range(len(samples)):
            assert sum(i in tile.samples for tile in tiles) == 1


def test_logprobs_of_a_session_are_those_of_its_rows():
    (sample,) = samples_of(FORKED)
    policy = make_policy(torch.float64)
    (logprobs,) = logprobs_of(policy, [sample])
    expected, _ = logprobs_by_hand(tiny_llama().double(), FORKED)
    np.testing.assert_allclose(logprobs[sample.mask], expected.detach().numpy(), rtol=1e-6)
    assert len(logprobs) == 8


def test_what_the_environment_said_changes_no_number_of_its_own():
    """Broken, the logprob of 0.0 that its tokens carry would be taken for the engine's."""
    algorithm = {"reference": {"model": "frozen"}, "kl": {"place": "loss"}}
    sums = []
    for said in (0.0, -50.0):
        policy = make_policy(torch.float64, algorithm=algorithm)
        (sample,) = samples_of(FORKED)
        logprobs = np.where(sample.mask, sample.rollout_logprobs, said).astype(np.float32)
        (tokens,) = policy.precompute([sample])
        reference = np.where(sample.mask, tokens["reference_logprobs"], said).astype(np.float32)
        answered = changed(sample, rollout_logprobs=logprobs, reference_logprobs=reference)
        sums.append((policy.accumulate(one_batch([answered])), gradients_of(policy).tolist()))
    assert sums[0] == sums[1]


def filtered(*trajectories: Trajectory, **algorithm: Any) -> list[Sample]:
    config = trainer_config(
        algorithm=algorithm,
        rollout__environment={"use": "my_env.py:MyEnv"},
        reward__rewards={"game": {"environment": True, "weight": 2.0}, "other": {"function": "gsm8k"}},
    )
    scores = {t.index: make_score(0, t.index, float(t.index)) for t in trajectories}
    group = Group(0, 0, {t.index: t for t in trajectories}, scores)
    refusal = GroupFilter(config).apply(group, 1)
    assert refusal is None, refusal
    return group.samples


def test_a_truncated_session_is_masked_over_all_its_segments():
    cut = make_session(0, 1, *FORKED.segments, finish="length", end="max_turns")
    whole = make_session(0, 0, *FORKED.segments)
    assert [s.num_trained for s in filtered(whole, cut, mask_truncated=True)] == [5, 0]
    assert [s.num_trained for s in filtered(whole, cut)] == [5, 5]


def test_a_session_without_a_token_of_the_model_counts_as_an_empty_completion_does():
    none = make_segment((3, 4), (), (8, 9))
    (sample,) = samples_of(make_session(0, 0, none))
    policy = make_policy(torch.float64, algorithm={"normalisation": "sequence"})
    metrics = policy.accumulate(one_batch([sample]))
    assert (metrics.sequences, metrics.tokens, metrics.denominator) == (1, 0, 1.0)
    assert policy.update(1.0).skipped


def test_turns_end_where_the_session_says_and_weigh_what_the_run_says():
    first = make_segment((3,), (4, 5), (6,), (7,), rewards=(0.5, None))
    session = make_session(0, 0, first, make_segment((8, 9), (10, 11), rewards=(-1.0,)))
    sample, _ = filtered(session, make_session(0, 1))
    assert sample.turns == ((2, 1.0), (4, 0.0), (6, -2.0))
    assert sample.turn_A.tolist() == [0, 0, 1, 2, 2]


def test_only_the_models_tokens_count_with_their_versions():
    session = make_session(0, 0, make_segment((3,), (4, 5), (6,), (7,), version=3), make_segment((8,), (9,)))
    assert num_sampled(session) == 4
    assert session.token_versions()[make_sample(session).mask].tolist() == [3, 3, 4, 0]


def test_a_bad_number_in_a_fork_is_refused_as_in_any_row():
    bad = make_segment((8,), (9,), logprob=float("nan"))
    with pytest.raises(ValueError, match="finite"):
        make_sample(make_session(0, 0, *FORKED.segments, bad))
    with pytest.raises(ValueError, match="prompt is empty"):
        make_sample(make_session(0, 0, *FORKED.segments, make_segment((), (9,))))
