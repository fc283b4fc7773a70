"""What a group takes in, and its one outcome once it is complete: the same each time it is asked for."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tests.support.samples import assigned
from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.streams import Entry
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.messages import LOGPROBS_FAULT, Choices, Score, Trajectory
from tidemill.common.wire.routes import Routing, find_routes_fault
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import (
    BAD_NUMBERS,
    FAILED_SCORE,
    FEW_SCORES,
    GREEDY,
    MISSING_TEACHER,
    NO_BASELINE,
    NO_CHOICES,
    STALE,
    ZERO_VARIANCE,
    GroupFilter,
    Refusal,
)


def filtered(config: RunConfig, group: Group, step: int = 5) -> Group | Refusal:
    return GroupFilter(config).apply(group, step) or group


def group_of(*values: float | None, version: int = 5, **fields: Any) -> Group:
    """A group of ticket 7 with these scores; None is a failed one."""
    size = len(values)
    return Group(
        ticket=7,
        step=5,
        trajectories={
            i: make_trajectory(7, i, group_size=size, spans=((version, 0),), **fields) for i in range(size)
        },
        scores={i: make_score(7, i, value, error="no answer") for i, value in enumerate(values)},
    )


def advantages_of(config: RunConfig, verdict: Group | Refusal) -> list[float]:
    (group,) = assigned(Advantages(config), trained(verdict))
    return [sample.mean_advantage for sample in group.samples]


def config_of(**fields: Any) -> RunConfig:
    return trainer_config(group_size=4, **fields)


def trained(verdict: Group | Refusal) -> Group:
    assert isinstance(verdict, Group), verdict
    return verdict


def refused(verdict: Group | Refusal) -> Refusal:
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
    turned = Group(7, 5, dict(reversed(group.trajectories.items())), dict(reversed(group.scores.items())))
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
    def test_a_turn_that_was_cut_is_masked_alone_where_the_session_ended_well(self):
        sub = make_segment((11,), (12, 13), (14,), (15,))
        cut = sub.model_copy(
            update={"turns": (sub.turns[0].model_copy(update={"finish": "length"}), sub.turns[1])}
        )
        session = make_session(7, 0, cut, make_segment((3, 4), (5, 6)), group_size=2)
        group = Group(
            7, 5, {0: session, 1: make_session(7, 1, group_size=2)}, {i: make_score(7, i, i) for i in (0, 1)}
        )
        outcome = filtered(config_of(algorithm={"mask_truncated": True}, max_staleness=5), group)
        assert isinstance(outcome, Group)
        assert outcome.samples[0].mask.tolist() == [False, False, False, True, True, True]

    def test_truncated_completions_are_masked_only_when_asked(self):
        masking = config_of(algorithm={"mask_truncated": True})
        verdicts = []
        for config in (config_of(), masking):
            group = group_of(1.0, 0.0)
            group.trajectories[0] = make_trajectory(7, 0, group_size=2, spans=((5, 0),), finish="length")
            verdicts.append(trained(filtered(config, group)))
        unmasked, verdict = verdicts
        assert [sample.num_trained for sample in unmasked.samples] == [3, 3]
        assert [sample.num_trained for sample in verdict.samples] == [0, 3]
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
        for index, trajectory in group.trajectories.items():
            group.trajectories[index] = trajectory.model_copy(update={"choices": choices})
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
    def with_greedy(*values: float | None, **fields: Any) -> Group:
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
        one_is_enough = config_of(algorithm={"advantage": "remax"}, reward__min_group_size=1)
        alone = refused(filtered(one_is_enough, self.with_greedy(1.0, None, None)))
        assert alone.reason == FEW_SCORES, "there is nothing to train"

    def test_other_advantages_never_train_on_a_greedy_sample(self):
        verdict = trained(filtered(config_of(), self.with_greedy(1.0, 1.0, 0.0)))
        assert [sample.key for sample in verdict.samples] == [(7, 1), (7, 2)]
        assert (verdict.left_out, verdict.baseline) == ([(0, GREEDY)], None)
        refusal = refused(filtered(config_of(), self.with_greedy(1.0, 0.0)))
        assert refusal.reason == FEW_SCORES and refusal.detail.startswith("1 of 2")

    def test_a_greedy_sample_needs_no_sampling_masks(self):
        """It was sampled from no ids but the likeliest."""
        config = config_of(algorithm={"advantage": "remax"})
        group = self.with_greedy(0.25, 1.0, 0.0)
        for index in (1, 2):
            sampled = group.trajectories[index]
            kept = Rows.of_lists([[token] for token in sampled.completion_ids.tolist()])
            masks = Choices(rows={KEPT: kept})
            group.trajectories[index] = sampled.model_copy(update={"choices": masks})
        verdict = trained(filtered(config, group))
        assert verdict.left_out == [(0, GREEDY)]

    def test_zero_variance_counts_the_baseline(self):
        config = config_of(algorithm={"advantage": "remax", "filter_zero_variance": True})
        assert refused(filtered(config, self.with_greedy(1.0, 1.0, 1.0))).reason == ZERO_VARIANCE
        assert advantages_of(config, filtered(config, self.with_greedy(0.0, 1.0, 1.0))) == [1.0, 1.0]


RULE = {"function": "math"}
TEACHER = {"teacher": {"servers": "there"}}
MEASURED = TEACHER | {"weight": 0.0}


def teaching(rewards: Any = None, **fields: Any) -> RunConfig:
    """Two samples a group, a rule and a teacher of all sources."""
    return trainer_config(
        reward__rewards=rewards or {"rule": RULE, "wise": TEACHER}, servers__there={}, **fields
    )


def taught(*values: float, teacher: Any = (-0.25, -0.5, -1.0), **fields: Any) -> Group:
    """Completions of three tokens, each with logprob -0.5."""
    group = group_of(*values, **fields)
    update = {"teacher_logprobs": np.array(teacher, np.float32)}
    group.scores = {index: score.model_copy(update=update) for index, score in group.scores.items()}
    return group


class TestTeacher:
    """On-policy distillation. Its terms in advantages, losses and metrics: see those."""

    ALONE = teaching({"wise": TEACHER}, reward__min_group_size=1)

    def test_each_sampled_token_gets_its_teachers_logprob(self):
        segments = (make_segment((3, 4), (6,), (8, 9), (11, 12)), make_segment((14, 15, 16), (17, 18), (19,)))
        logprobs = -np.arange(1, sum(int(segment.mask.sum()) for segment in segments) + 1, dtype=np.float32)
        score = make_score(7, 0, 0.0, teacher_logprobs=logprobs)
        group = Group(7, 5, {0: make_session(7, 0, *segments)}, {0: score})
        (sample,) = trained(filtered(self.ALONE, group, group.trajectories[0].max_version)).samples
        assert not sample.mask.all()
        teacher_T = sample.columns["teacher_logprobs"]
        np.testing.assert_array_equal(teacher_T[sample.mask], logprobs)
        assert not teacher_T[~sample.mask].any()

    def test_a_score_that_a_value_stands_for_is_no_lesson(self):
        """Such as that of a group function in place of a failed teacher's: never a silent zero."""
        group = group_of(1.0, 0.0)
        assert refused(filtered(teaching(), group)).reason == FEW_SCORES
        group.scores[1] = taught(0.0, 0.0).scores[1]
        verdict = trained(filtered(self.ALONE, group))
        assert [sample.key[1] for sample in verdict.samples] == [1]
        assert verdict.left_out == [(0, MISSING_TEACHER)]

    def test_the_runs_value_for_failed_scores_is_no_lesson_either(self):
        group = taught(1.0, 0.0)
        group.scores[0] = make_score(7, 0, None, error="no answer")
        rewards = {"rule": RULE, "wise": TEACHER | {"on_failure": "drop_sample"}}
        config = teaching(rewards, reward__min_group_size=1, reward__on_failure=-0.5)
        assert trained(filtered(config, group)).left_out == [(0, FAILED_SCORE)]

    def test_logprobs_of_other_tokens_are_refused(self):
        refusal = refused(filtered(teaching(), taught(1.0, 0.0, teacher=(-0.5, -0.5))))
        assert refusal.reason == BAD_NUMBERS and "2 logprobs for 3 sampled tokens" in refusal.detail

    def test_samples_of_one_reward_teach_where_a_teacher_counts(self):
        trained(filtered(teaching(**FILTER), taught(1.0, 1.0)))
        refused(filtered(teaching({"rule": RULE, "wise": MEASURED}, **FILTER), taught(1.0, 1.0)))

    def test_the_teacher_is_that_of_the_data_source(self):
        of_a = TEACHER | {"applies_to": ["a"], "weight": 1.0}
        of_b = TEACHER | {"applies_to": ["b"], "weight": 2.0}
        config = teaching({"rule": RULE, "one": of_a, "two": of_b})
        for source, expected in (("a", ("one", 1.0)), ("b", ("two", 2.0)), ("c", ("", 0.0))):
            sample = trained(filtered(config, taught(1.0, 0.0, data_source=source))).samples[0]
            assert (sample.teacher, sample.teacher_weight) == expected

    def test_truncated_completions_are_left_out_of_the_lesson_too(self):
        config = teaching(algorithm={"mask_truncated": True})
        verdict = trained(filtered(config, taught(1.0, 0.0, finish="length")))
        (group,) = assigned(Advantages(config), verdict)
        assert all(sample.num_trained == 0 and sample.mean_advantage == 0.0 for sample in group.samples)

    def test_a_teacher_alone_can_teach_groups_of_one(self):
        held_out = RULE | {"lanes": ["eval"]}
        weightless = RULE | {"weight": 0.0}
        config = teaching({"wise": TEACHER, "rule": held_out}, group_size=1, reward__min_group_size=1)
        assert config.reward.distils_alone
        assert teaching({"wise": TEACHER, "rule": weightless}).reward.distils_alone
        for rewards in (None, {"rule": RULE, "wise": MEASURED}):
            assert not teaching(rewards).reward.distils_alone


def test_a_sample_without_its_routes_fails_where_the_policy_replays_them():
    group = group_of(1.0, 0.0, 1.0)
    routes = Rows(np.arange(12, dtype=np.uint8).reshape(6, 1, 2))  # 4 + 3 tokens, the last has none
    for index in (0, 1):
        choices = Choices(rows={ROUTES: routes})
        group.trajectories[index] = group.trajectories[index].model_copy(update={"choices": choices})
    group_filter = GroupFilter(config_of())
    assert len(trained(group_filter.apply(group, 5) or group).samples) == 3
    group_filter.routing = Routing((0,), num_experts=12)
    verdict = trained(group_filter.apply(group, 5) or group)
    assert verdict.left_out == [(2, NO_CHOICES)]
    assert [len(sample.routes[0].experts) for sample in verdict.samples] == [6, 6]


@pytest.mark.parametrize("experts", [[0, 0], [5, 5], [1, 12]])
def test_routes_that_are_no_choice_of_the_models_routers_fail_their_sample(experts):
    """Also where no rollout worker has looked: in records of an older run, or of others."""
    group = group_of(1.0, 0.0, 1.0)
    for index in range(3):
        values = np.arange(12, dtype=np.uint8).reshape(6, 1, 2)
        if index == 1:
            values[4, 0] = experts
        choices = Choices(rows={ROUTES: Rows(values)})
        group.trajectories[index] = group.trajectories[index].model_copy(update={"choices": choices})
    group_filter = GroupFilter(config_of())
    group_filter.routing = Routing((0,), num_experts=12)
    assert trained(group_filter.apply(group, 5) or group).left_out == [(1, NO_CHOICES)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (find_routes_fault(Rows(np.zeros((6, 1, 2), np.uint8))), NO_CHOICES),
        (f"{LOGPROBS_FAULT}are not finite", BAD_NUMBERS),
    ],
)
def test_a_sample_that_failed_by_its_engine_is_not_called_an_environments_fault(fault, reason):
    group = group_of(1.0, 0.0, 1.0)
    group.trajectories[2] = group.trajectories[2].model_copy(update={"fault": fault})
    assert trained(GroupFilter(config_of()).apply(group, 5) or group).left_out == [(2, reason)]


def scored(text: str, index: int = 0) -> tuple[Trajectory, Score]:
    """A sample whose tokens are its text, and a score of them: 0.25 for `lost`, 0.75 for others."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    logprobs = np.full(len(ids), -0.5, np.float32)
    sample = make_trajectory(0, index, text, group_size=2, completion_ids=ids, logprobs=logprobs)
    value = 0.25 if text == "lost" else 0.75
    return sample, make_score(0, index, value, tokens_digest=sample.tokens_digest)


def pending(*messages: Any) -> tuple[Group, list[str]]:
    """A group of two that was given these messages, and the ids (from 1 on) of those that do not count."""
    group = Group(0, 0, group_size=2)
    entries = [Entry(f"{number}-0", message) for number, message in enumerate(messages, 1)]
    return group, [refused.entry_id for entry in entries for refused in group.take(entry)]


def values_in(group: Group) -> dict[int, float | None]:
    return {index: score.value for index, score in sorted(group.scores.items())}


def test_the_first_entry_of_a_key_wins_and_no_other_index_counts():
    texts = [make_trajectory(0, index, text, group_size=9) for index, text in ((0, "a"), (0, "b"), (8, "c"))]
    group, refused = pending(*texts, make_score(0, 0, 0.25), make_score(0, 0, 0.75), make_score(0, 8))
    assert refused == ["2-0", "3-0", "5-0", "6-0"]
    assert ([sample.text for sample in group.trajectories.values()], values_in(group)) == (["a"], {0: 0.25})
    assert (group.trajectory_ids, group.score_ids) == ({0: "1-0"}, {0: "4-0"})


def test_scores_of_other_tokens_are_refused_and_those_of_its_own_are_taken():
    """A key has come twice: `lost` was generated before Redis lost its tail, `again` after it."""
    (_, old) = scored("lost")
    (sample, its_score) = scored("again")
    for in_order in permutations((sample, old, its_score)):
        group, refused = pending(*in_order)
        assert values_in(group) == {0: 0.75} and not group.other_scores
        is_never_first = in_order[0] is its_score and in_order[2] is sample
        assert refused == ([] if is_never_first else [f"{in_order.index(old) + 1}-0"])


def test_scores_of_other_tokens_do_not_complete_a_group():
    (_, old) = scored("lost")
    (again, _) = scored("again")
    (second, second_score) = scored("again", 1)
    for in_order in ((old, second, second_score, again), (again, second, second_score, old)):
        group, _ = pending(*in_order)
        assert not group.is_complete and list(group.scores) == [1]


def test_a_score_of_an_older_release_names_no_tokens_and_is_taken():
    assert values_in(pending(scored("again")[0], make_score(0, 0, 0.5))[0]) == {0: 0.5}


def test_scores_that_wait_for_their_trajectory_are_bounded():
    group, refused = pending(*(scored(text)[1] for text in ("lost", "one", "two", "three", "four")))
    assert [entry.entry_id for entry in group.other_scores] == ["2-0", "3-0"]
    assert refused == ["4-0", "5-0"]
