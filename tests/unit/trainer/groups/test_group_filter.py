"""Every complete group has exactly one outcome, and the same one each time it is asked for."""

from typing import Any

import numpy as np
import pytest

from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config import RunConfig
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.groups.group_filter import (
    BAD_NUMBERS,
    FAILED_SCORE,
    FEW_SCORES,
    GREEDY,
    NO_BASELINE,
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


def test_a_whole_group_becomes_samples_with_advantages_of_their_own():
    verdict = trained(filtered(config_of(), group_of(1.0, 0.0, 0.0, 1.0)))
    assert [sample.key for sample in verdict.samples] == [(7, 0), (7, 1), (7, 2), (7, 3)]
    # mean 0.5, unbiased std 0.57735: 0.5 / (0.57735 + 1e-4) = 0.865876
    assert advantages_of(config_of(), verdict) == pytest.approx(
        [0.865876, -0.865876, -0.865876, 0.865876], abs=1e-6
    )
    assert (verdict.rewards, verdict.left_out) == ([1.0, 0.0, 0.0, 1.0], [])


class TestStaleness:
    @pytest.mark.parametrize(("max_staleness", "version"), [(0, 5), (1, 4), (3, 2)])
    def test_a_token_as_old_as_the_bound_is_trained_one_step_older_is_not(self, max_staleness, version):
        config = config_of(max_staleness=max_staleness)
        trained(filtered(config, group_of(1.0, 0.0, version=version)))
        refusal = refused(filtered(config, group_of(1.0, 0.0, version=version - 1)))
        assert (refusal.ticket, refusal.reason) == (7, STALE)
        assert f"version {version - 1} at step 5, max_staleness {max_staleness}" in refusal.detail

    def test_one_old_token_of_one_trajectory_is_enough(self):
        group = group_of(1.0, 0.0)
        group.trajectories[1] = make_trajectory(7, 1, group_size=2, spans=((3, 0), (5, 1)))
        assert refused(filtered(config_of(), group)).reason == STALE

    def test_staleness_comes_before_every_other_outcome(self):
        assert refused(filtered(config_of(), group_of(None, None, version=1))).reason == STALE


class TestFailedScores:
    def test_drop_sample_leaves_the_failed_ones_out_by_name(self):
        verdict = trained(filtered(config_of(), group_of(1.0, None, 0.0, None)))
        assert [sample.key for sample in verdict.samples] == [(7, 0), (7, 2)]
        assert verdict.left_out == [(1, FAILED_SCORE), (3, FAILED_SCORE)]
        # Advantages over the remaining two: mean 0.5, std 0.70711: 0.5 / 0.70721 = 0.707
        assert advantages_of(config_of(), verdict) == pytest.approx([0.70701, -0.70701], abs=1e-5)

    @pytest.mark.parametrize(("min_group_size", "is_trained"), [(2, True), (3, False), (4, False)])
    def test_drop_sample_needs_min_group_size_scores(self, min_group_size, is_trained):
        config = config_of(reward__min_group_size=min_group_size)
        verdict = filtered(config, group_of(1.0, None, 0.0, None))
        assert isinstance(verdict, TrainableGroup) is is_trained
        if not is_trained:
            assert refused(verdict).reason == FEW_SCORES
            assert refused(verdict).detail.startswith("2 of 4 scored")

    def test_drop_group_refuses_on_the_first_failure_and_says_which(self):
        config = config_of(reward__on_failure="drop_group")
        refusal = refused(filtered(config, group_of(1.0, 0.0, 1.0, None)))
        assert (refusal.reason, refusal.detail) == (FAILED_SCORE, "no answer")
        trained(filtered(config, group_of(1.0, 0.0, 1.0, 0.0)))

    def test_value_is_what_the_config_says_never_a_silent_zero(self):
        config = config_of(reward__on_failure=-0.5)
        verdict = trained(filtered(config, group_of(1.0, None, 0.0, None)))
        assert verdict.rewards == [1.0, -0.5, 0.0, -0.5]
        assert verdict.left_out == []

    def test_a_group_without_any_score_is_replaced(self):
        assert refused(filtered(config_of(), group_of(None, None, None, None))).reason == FEW_SCORES


class TestZeroVariance:
    def test_the_filter_replaces_groups_whose_rewards_are_all_equal(self):
        config = config_of(algorithm={"filter_zero_variance": True})
        assert refused(filtered(config, group_of(0.1, 0.1, 0.1, 0.1))).reason == ZERO_VARIANCE
        trained(filtered(config, group_of(0.1, 0.1, 0.1, 0.2)))

    def test_failed_scores_are_no_variance(self):
        config = config_of(algorithm={"filter_zero_variance": True})
        assert refused(filtered(config, group_of(0.1, None, 0.1, 0.1))).reason == ZERO_VARIANCE

    def test_without_the_filter_such_a_group_is_trained_with_advantages_of_zero(self):
        verdict = trained(filtered(config_of(), group_of(1.0, 1.0, 1.0, 1.0)))
        assert advantages_of(config_of(), verdict) == [0.0] * 4


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
        assert [s.num_trained for s in trained(filtered(masking, group)).samples] == [0, 3]
        assert [s.num_trained for s in trained(filtered(config_of(), group)).samples] == [3, 3]

    def test_a_masked_completion_still_counts_in_the_groups_mean(self):
        group = group_of(1.0, 0.0)
        group.trajectories[0] = make_trajectory(7, 0, group_size=2, spans=((5, 0),), finish="length")
        config = config_of(algorithm={"mask_truncated": True})
        verdict = trained(filtered(config, group))
        assert verdict.rewards == [1.0, 0.0]
        assert advantages_of(config, verdict)[1] == pytest.approx(-0.70701, abs=1e-5)

    def test_the_trajectorys_own_mask_is_kept(self):
        group = group_of(1.0, 0.0)
        mask = np.array([True, False, True])
        group.trajectories[1] = make_trajectory(7, 1, group_size=2, spans=((5, 0),), loss_mask=mask)
        assert trained(filtered(config_of(), group)).samples[1].mask.tolist() == mask.tolist()


def test_a_group_of_one_is_trained_with_an_advantage_of_zero():
    config = config_of(reward__min_group_size=1)
    assert advantages_of(config, filtered(config, group_of(1.0, None, None, None))) == [0.0]


def test_the_same_group_always_has_the_same_outcome_whatever_order_its_parts_came_in():
    group = group_of(1.0, None, 0.25, 0.5)
    turned = PendingGroup(
        7, 5, dict(reversed(group.trajectories.items())), dict(reversed(group.scores.items()))
    )
    first, second = trained(filtered(config_of(), group)), trained(filtered(config_of(), turned))
    assert [s.key for s in first.samples] == [s.key for s in second.samples]
    assert [s.reward for s in first.samples] == [s.reward for s in second.samples]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_a_logprob_that_is_no_number_is_refused_and_not_a_crash(number):
    group = group_of(1.0, 0.0, 0.0, 1.0)
    bad = group.trajectories[2]
    logprobs = np.full(bad.num_tokens, number, dtype=np.float32)
    group.trajectories[2] = bad.model_copy(update={"logprobs": logprobs})
    assert refused(filtered(config_of(), group)).reason == BAD_NUMBERS


def test_rewards_beyond_all_reason_are_refused_and_not_a_crash():
    assert refused(filtered(config_of(), group_of(1e308, 1e308, -1e308, -1e308))).reason == BAD_NUMBERS


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
        config = config_of()
        config = config.model_copy(
            update={"reward": config.reward.model_copy(update={"on_failure": "drop_group"})}
        )
        refused(filtered(config, self.with_policy("")))
        assert trained(filtered(config, self.with_policy("drop_sample"))).left_out == [(2, FAILED_SCORE)]

    def test_the_runs_value_is_not_for_scores_with_a_policy_of_their_own(self):
        config = config_of()
        update = {"on_failure": 0.5}
        config = config.model_copy(update={"reward": config.reward.model_copy(update=update)})
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
