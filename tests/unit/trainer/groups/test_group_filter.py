"""Every complete group has exactly one outcome, and the same one each time it is asked for."""

from typing import Any

import numpy as np
import pytest

from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.messages import Choices
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.groups.group_filter import (
    BAD_NUMBERS,
    FAILED_SCORE,
    FEW_SCORES,
    GREEDY,
    NO_BASELINE,
    NO_CHOICES,
    STALE,
    ZERO_VARIANCE,
    GroupFilter,
    PendingGroup,
    Refusal,
    TrainableGroup,
)


def filtered(config: RunConfig, group: PendingGroup, step: int = 5) -> TrainableGroup | Refusal:
    return GroupFilter(config).apply(group, step)


def group_of(*values: float | None, version: int = 5, **fields: Any) -> PendingGroup:
    """A group of ticket 7 with these scores; None is a failed one."""
    size = len(values)
    return PendingGroup(
        ticket=7,
        step=5,
        trajectories={
            i: make_trajectory(7, i, group_size=size, spans=((version, 0),), **fields) for i in range(size)
        },
        scores={i: make_score(7, i, value, error="no answer") for i, value in enumerate(values)},
    )


def advantages_of(config: RunConfig, verdict: TrainableGroup | Refusal) -> list[float]:
    (group,) = Advantages(config).assign([trained(verdict)])
    return [sample.mean_advantage for sample in group.samples]


def config_of(**fields: Any) -> RunConfig:
    return trainer_config(group_size=4, **fields)


def trained(verdict: TrainableGroup | Refusal) -> TrainableGroup:
    assert isinstance(verdict, TrainableGroup), verdict
    return verdict


def refused(verdict: TrainableGroup | Refusal) -> Refusal:
    assert isinstance(verdict, Refusal), verdict
    return verdict


@pytest.mark.parametrize(("max_staleness", "version"), [(0, 5), (1, 4), (3, 2)])
def test_a_token_as_old_as_the_bound_is_trained_one_step_older_is_not(max_staleness, version):
    config = config_of(max_staleness=max_staleness)
    trained(filtered(config, group_of(1.0, 0.0, version=version)))
    one_old = group_of(1.0, 0.0)
    one_old.trajectories[1] = make_trajectory(7, 1, group_size=2, spans=((version - 1, 0), (5, 1)))
    # It comes before every other outcome.
    for group in (one_old, group_of(None, None, version=version - 1)):
        refusal = refused(filtered(config, group))
        assert refusal.reason == STALE
        assert f"version {version - 1} at step 5, max_staleness {max_staleness}" in refusal.detail


FILTER = {"algorithm": {"filter_zero_variance": True}}
FAILED = [(1, FAILED_SCORE), (3, FAILED_SCORE)]


@pytest.mark.parametrize(
    ("fields", "values", "rewards", "left_out"),
    [
        ({}, (1.0, 0.0, 0.0, 1.0), [1.0, 0.0, 0.0, 1.0], []),
        ({}, (1.0, 1.0, 1.0, 1.0), [1.0] * 4, []),
        # `drop_sample`, the default, leaves the failed ones out by name.
        ({"reward__min_group_size": 2}, (1.0, None, 0.0, None), [1.0, 0.0], FAILED),
        # What the config says in their place; never a silent zero.
        ({"reward__on_failure": -0.5}, (1.0, None, 0.0, None), [1.0, -0.5, 0.0, -0.5], []),
        ({"reward__on_failure": "drop_group"}, (1.0, 0.0, 1.0, 0.0), [1.0, 0.0, 1.0, 0.0], []),
        (FILTER, (0.1, 0.1, 0.1, 0.2), [0.1, 0.1, 0.1, 0.2], []),
    ],
)
def test_a_group_that_is_trained_names_what_it_leaves_out(fields, values, rewards, left_out):
    group = group_of(*values)
    turned = PendingGroup(
        7, 5, dict(reversed(group.trajectories.items())), dict(reversed(group.scores.items()))
    )
    for arrived in (group, turned):
        verdict = trained(filtered(config_of(**fields), arrived))
        assert (verdict.rewards, verdict.left_out) == (rewards, left_out)
        assert [sample.reward for sample in verdict.samples] == rewards
        assert [sample.key for sample in verdict.samples] == [
            (7, index) for index in range(4) if (index, FAILED_SCORE) not in left_out
        ]


@pytest.mark.parametrize(
    ("fields", "values", "reason", "detail"),
    [
        ({"reward__min_group_size": 3}, (1.0, None, 0.0, None), FEW_SCORES, "2 of 4"),
        ({}, (None, None, None, None), FEW_SCORES, "0 of 4"),
        ({"reward__on_failure": "drop_group"}, (1.0, 0.0, 1.0, None), FAILED_SCORE, "no answer"),
        (FILTER, (0.1, 0.1, 0.1, 0.1), ZERO_VARIANCE, "0.1"),
        (FILTER, (0.1, None, 0.1, 0.1), ZERO_VARIANCE, "0.1"),
        ({}, (1e308, 1e308, -1e308, -1e308), BAD_NUMBERS, "1e+30"),
    ],
)
def test_a_group_that_cannot_be_trained_is_replaced_for_a_reason(fields, values, reason, detail):
    refusal = refused(filtered(config_of(**fields), group_of(*values)))
    assert refusal.reason == reason and detail in refusal.detail


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Mean 0.5, unbiased std 0.57735: 0.5 / (0.57735 + 1e-4) = 0.865876; of two, 0.5 / 0.70721 = 0.707.
        ((1.0, 0.0, 0.0, 1.0), [0.865876, -0.865876, -0.865876, 0.865876]),
        ((1.0, None, 0.0, None), [0.70701, -0.70701]),
        ((1.0, 1.0, 1.0, 1.0), [0.0] * 4),
        ((1.0, None, None, None), [0.0]),
    ],
)
def test_advantages_are_over_the_samples_that_are_left(values, expected):
    config = config_of(reward__min_group_size=1)
    verdict = filtered(config, group_of(*values))
    assert advantages_of(config, verdict) == pytest.approx(expected, abs=1e-5)


class TestMasks:
    def test_a_turn_that_was_cut_is_masked_alone_where_the_session_ended_well(self) -> None:
        sub = make_segment((11,), (12, 13), (14,), (15,))
        cut = sub.model_copy(
            update={"turns": (sub.turns[0].model_copy(update={"finish": "length"}), sub.turns[1])}
        )
        made = make_session(7, 0, cut, make_segment((3, 4), (5, 6)), group_size=2)
        group = PendingGroup(
            7, 5, {0: made, 1: make_session(7, 1, group_size=2)}, {i: make_score(7, i, i) for i in (0, 1)}
        )
        outcome = filtered(config_of(algorithm={"mask_truncated": True}, max_staleness=5), group)
        assert isinstance(outcome, TrainableGroup)
        assert outcome.samples[0].mask.tolist() == [False, False, False, True, True, True]

    def test_truncated_completions_are_masked_only_when_asked(self):
        group = group_of(1.0, 0.0)
        group.trajectories[0] = make_trajectory(7, 0, group_size=2, spans=((5, 0),), finish="length")
        masking = config_of(algorithm={"mask_truncated": True})
        verdict = trained(filtered(masking, group))
        assert [sample.num_trained for sample in verdict.samples] == [0, 3]
        assert [s.num_trained for s in trained(filtered(config_of(), group)).samples] == [3, 3]
        assert verdict.rewards == [1.0, 0.0], "it still counts in the group's mean"
        assert advantages_of(masking, verdict)[1] == pytest.approx(-0.70701, abs=1e-5)

    def test_the_trajectorys_own_mask_is_kept(self):
        group = group_of(1.0, 0.0)
        mask = np.array([True, False, True])
        group.trajectories[1] = make_trajectory(7, 1, group_size=2, spans=((5, 0),), loss_mask=mask)
        assert trained(filtered(config_of(), group)).samples[1].mask.tolist() == mask.tolist()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_a_logprob_that_is_no_number_is_refused_and_not_a_crash(number):
    kept = Rows.of_lists([[token] for token in make_trajectory().completion_ids.tolist()])
    for choices in (None, Choices(rows={KEPT: kept})):
        group = group_of(1.0, 0.0, 0.0, 1.0)
        for index, one in group.trajectories.items():
            group.trajectories[index] = one.model_copy(update={"choices": choices})
        bad = group.trajectories[2]
        logprobs = np.full(bad.num_tokens, number, dtype=np.float32)
        group.trajectories[2] = bad.model_copy(update={"logprobs": logprobs})
        assert refused(filtered(config_of(), group)).reason == BAD_NUMBERS


class TestPoliciesOfSingleRewards:
    """A reward may have a failure policy of its own; its score says so."""

    def with_policy(self, on_failure):
        group = group_of(1.0, 0.0, None)
        group.scores[2] = group.scores[2].model_copy(update={"on_failure": on_failure})
        return group

    def test_a_score_that_asks_for_it_drops_the_group(self):
        refusal = refused(filtered(config_of(), self.with_policy("drop_group")))
        assert (refusal.reason, refusal.detail) == (FAILED_SCORE, "no answer")

    def test_a_score_that_asks_for_its_sample_alone_is_obeyed_where_the_run_would_drop_the_group(self):
        config = config_of(reward__on_failure="drop_group")
        refused(filtered(config, self.with_policy("")))
        assert trained(filtered(config, self.with_policy("drop_sample"))).left_out == [(2, FAILED_SCORE)]

    def test_the_runs_value_is_not_for_scores_with_a_policy_of_their_own(self):
        config = config_of(reward__on_failure=0.5)
        assert trained(filtered(config, self.with_policy(""))).rewards == [1.0, 0.0, 0.5]
        assert trained(filtered(config, self.with_policy("drop_sample"))).rewards == [1.0, 0.0]


class TestGreedyBaseline:
    @staticmethod
    def with_greedy(*values: float | None, **fields: Any) -> PendingGroup:
        group = group_of(*values, **fields)
        group.trajectories[0] = group.trajectories[0].model_copy(update={"is_greedy": True})
        return group

    def test_the_greedy_sample_is_compared_with_and_left_out_with_a_reason(self):
        config = config_of(algorithm={"advantage": "remax"})
        verdict = trained(filtered(config, self.with_greedy(0.25, 1.0, 0.0)))
        assert [sample.key for sample in verdict.samples] == [(7, 1), (7, 2)]
        assert (verdict.rewards, verdict.left_out) == ([1.0, 0.0], [(0, GREEDY)])
        assert advantages_of(config, verdict) == [0.75, -0.25]

    def test_the_baseline_pays_for_being_overlong_as_the_others_do(self):
        overlong = {"penalty": 1.0, "buffer_share": 1.0}
        config = config_of(
            algorithm={"advantage": "remax", "overlong": overlong}, rollout__sampling={"max_tokens": 8}
        )
        group = self.with_greedy(1.0, 1.0)
        verdict = trained(filtered(config, group))
        assert len(group.trajectories[0].completion_ids) == len(group.trajectories[1].completion_ids)
        assert advantages_of(config, verdict) == [0.0]

    def test_without_a_scored_baseline_the_group_is_replaced(self):
        config = config_of(algorithm={"advantage": "remax"})
        for group in (group_of(1.0, 0.0, 0.0), self.with_greedy(None, 1.0, 0.0)):
            assert refused(filtered(config, group)).reason == NO_BASELINE
        assert refused(filtered(config, self.with_greedy(1.0, None, None))).reason == FEW_SCORES

    def test_other_advantages_never_train_on_a_greedy_sample(self):
        verdict = trained(filtered(config_of(), self.with_greedy(1.0, 1.0, 0.0)))
        assert [sample.key for sample in verdict.samples] == [(7, 1), (7, 2)]
        assert (verdict.left_out, verdict.baseline) == ([(0, GREEDY)], None)
        refusal = refused(filtered(config_of(), self.with_greedy(1.0, 0.0)))
        assert refusal.reason == FEW_SCORES and refusal.detail.startswith("1 of 2")

    def test_zero_variance_counts_the_baseline(self):
        config = config_of(algorithm={"advantage": "remax", "filter_zero_variance": True})
        assert refused(filtered(config, self.with_greedy(1.0, 1.0, 1.0))).reason == ZERO_VARIANCE
        assert advantages_of(config, filtered(config, self.with_greedy(0.0, 1.0, 1.0))) == [1.0, 1.0]


def test_a_sample_without_its_routes_fails_where_the_policy_replays_them() -> None:
    group = group_of(1.0, 0.0, 1.0)
    routes = Rows(np.arange(12, dtype=np.uint8).reshape(6, 1, 2))  # 4 + 3 tokens, the last has none
    for index in (0, 1):
        choices = Choices(rows={ROUTES: routes})
        group.trajectories[index] = group.trajectories[index].model_copy(update={"choices": choices})
    group_filter = GroupFilter(config_of())
    assert len(trained(group_filter.apply(group, 5)).samples) == 3
    group_filter.needs_routes = True
    found = trained(group_filter.apply(group, 5))
    assert found.left_out == [(2, NO_CHOICES)]
    assert [len(sample.routes[0].experts) for sample in found.samples] == [6, 6]
