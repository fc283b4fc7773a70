"""On-policy distillation: filter, metrics and config. Its terms in advantages and losses: see those."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.groups.group_filter import (
    BAD_NUMBERS,
    FEW_SCORES,
    MISSING_TEACHER,
    GroupFilter,
    PendingGroup,
    Refusal,
    TrainableGroup,
)
from tidemill.services.trainer.metrics.step_metrics import stage_metrics, step_metrics
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.step import MiniBatch, StepResult

TEACHER: dict[str, Any] = {"teacher": {"servers": "there"}}
TWO_PROMPTS = TEACHER["teacher"] | {"prompt_column": "a", "template": "b"}


def config_of(algorithm: dict[str, Any] | None = None, **teacher: Any) -> RunConfig:
    """Two samples a group, a rule and a teacher of all sources."""
    rewards = {"rule": {"function": "math"}, "wise": TEACHER | teacher}
    return trainer_config(reward__rewards=rewards, servers__there={}, algorithm=algorithm or {})


def group_of(*values: float | None, teacher: Any = (-0.25, -0.5, -1.0), **fields: Any) -> PendingGroup:
    """Two completions of three tokens, each with logprob -0.5."""
    given = None if teacher is None else np.array(teacher, np.float32)
    return PendingGroup(
        ticket=7,
        step=5,
        trajectories={
            i: make_trajectory(7, i, group_size=2, spans=((5, 0),), **fields) for i in range(len(values))
        },
        scores={
            i: make_score(7, i, value, teacher_logprobs=None if value is None else given)
            for i, value in enumerate(values)
        },
    )


class TestFilter:
    def test_each_sampled_token_gets_its_teachers_logprob(self) -> None:
        session = make_session(
            7,
            0,
            make_segment((3, 4), (6,), (8, 9), (11, 12)),
            make_segment((14, 15, 16), (17, 18), (19,)),
        )
        sampled = sum(int(segment.mask.sum()) for segment in session.segments)
        logprobs = -np.arange(1, sampled + 1, dtype=np.float32)
        group = PendingGroup(7, 5, {0: session}, {0: make_score(7, 0, 0.0, teacher_logprobs=logprobs)})
        config = trainer_config(
            reward__min_group_size=1, reward__rewards={"wise": TEACHER}, servers__there={}
        )
        found = GroupFilter(config).apply(group, session.max_version)
        assert isinstance(found, TrainableGroup)
        (sample,) = found.samples
        assert sample.teaching is not None and not sample.mask.all()
        np.testing.assert_array_equal(sample.teaching.logprobs[sample.mask], logprobs)
        assert not sample.teaching.logprobs[~sample.mask].any()

    def test_a_score_that_a_value_stands_for_is_no_lesson(self) -> None:
        """Such as that of a group function in place of a failed teacher's: never a silent zero."""
        scores = {0: make_score(7, 0, 1.0), 1: make_score(7, 1, 0.0)}
        group = replace(group_of(1.0, 0.0), scores=scores)
        refused = GroupFilter(config_of()).apply(group, 5)
        assert isinstance(refused, Refusal) and refused.reason == FEW_SCORES
        one = trainer_config(reward__min_group_size=1, reward__rewards={"wise": TEACHER}, servers__there={})
        mixed = {0: scores[0], 1: group_of(0.0, 0.0).scores[1]}
        found = GroupFilter(one).apply(replace(group, scores=mixed), 5)
        assert isinstance(found, TrainableGroup)
        assert [sample.key[1] for sample in found.samples] == [1] and found.left_out == [(0, MISSING_TEACHER)]

    def test_logprobs_of_other_tokens_are_refused(self) -> None:
        found = GroupFilter(config_of()).apply(group_of(1.0, 0.0, teacher=(-0.5, -0.5)), 5)
        assert isinstance(found, Refusal) and found.reason == BAD_NUMBERS
        assert "2 logprobs for 3 sampled tokens" in found.detail

    def test_samples_of_one_reward_teach_where_a_teacher_counts(self) -> None:
        filters = {"filter_zero_variance": True}
        assert isinstance(GroupFilter(config_of(filters)).apply(group_of(1.0, 1.0), 5), TrainableGroup)
        measured = GroupFilter(config_of(filters, weight=0.0)).apply(group_of(1.0, 1.0), 5)
        assert isinstance(measured, Refusal)

    def test_the_teacher_is_that_of_the_data_source(self) -> None:
        one, two = (TEACHER | {"applies_to": [source], "weight": w} for source, w in (("a", 1.0), ("b", 2.0)))
        config = trainer_config(
            reward__rewards={"rule": {"function": "math"}, "one": one, "two": two}, servers__there={}
        )
        for source, expected in (("a", ("one", 1.0)), ("b", ("two", 2.0)), ("c", None)):
            found = GroupFilter(config).apply(group_of(1.0, 0.0, data_source=source), 5)
            assert isinstance(found, TrainableGroup)
            teaching = found.samples[0].teaching
            assert (teaching and (teaching.teacher, teaching.weight)) == expected

    def test_truncated_completions_are_left_out_of_the_lesson_too(self) -> None:
        config = config_of({"mask_truncated": True})
        found = GroupFilter(config).apply(group_of(1.0, 0.0, finish="length"), 5)
        assert isinstance(found, TrainableGroup)
        (group,) = Advantages(config).assign([found])
        assert all(sample.num_trained == 0 and sample.mean_advantage == 0.0 for sample in group.samples)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_the_step_says_how_far_the_policy_is_from_each_teacher(weight: float) -> None:
    """Groups that a teacher counts for are not without a lesson, although all rewards are equal."""
    found = GroupFilter(config_of(weight=weight)).apply(group_of(1.0, 1.0), 5)
    assert isinstance(found, TrainableGroup)
    update = UpdateResult(grad_norm=1.0, lr=0.1, skipped=False)
    metrics = step_metrics(5, StepResult([found], [MiniBatch(update=update)]), 0, 1.0)
    # -0.5 + 0.25, 0, -0.5 + 1: twice
    assert metrics["teacher/wise/reverse_kl"] == pytest.approx(0.25 / 3)
    assert metrics["teacher/wise/tokens"] == 6.0
    assert metrics["frac_reward_zero_std"] == (0.0 if weight else 1.0)
    plain = stage_metrics(list(found.source.trajectories.values()), [make_score(7, 0)])
    assert metrics["stages/record_bytes"] == plain["stages/record_bytes"] + 4 * 3


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"sampling": {"temperature": 0.7}}}, "temperature is 0.7"),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, "take place: loss"),
        ({"trainer": {"algorithm": {"preset": "gspo"}}}, "one advantage for a sequence"),
        ({"trainer": {"algorithm": {"teacher": {"place": "loss", "gamma": 0.5}}}}, "leave gamma out"),
        ({"reward": {"on_failure": 0.0}}, "cannot stand for a teacher"),
        ({"reward": {"rewards": {"wise": TEACHER | {"weight": -1.0}}}}, "at least 0"),
        ({"reward": {"rewards": {"wise": TEACHER, "other": TEACHER}}}, "both teachers of all data sources"),
        (
            {"reward": {"rewards": {n: TEACHER | {"applies_to": ["a", n]} for n in ("x", "y")}}},
            "both teachers of a,",
        ),
        (
            {"reward": {"rewards": {"wise": {"teacher": TWO_PROMPTS}}}},
            "not both",
        ),
    ],
)
def test_what_would_teach_something_else_is_refused(sections: dict[str, Any], said: str) -> None:
    reward = {"rewards": {"wise": TEACHER}} | sections.get("reward", {})
    with pytest.raises(ConfigError, match=said):
        make_config(servers={"there": {}}, **(sections | {"reward": reward}))


def test_a_teacher_alone_can_teach_groups_of_one() -> None:
    reward = {
        "min_group_size": 1,
        "rewards": {"wise": TEACHER, "rule": {"function": "math", "lanes": ["eval"]}},
    }
    config = make_config(reward=reward, servers={"there": {}}, trainer={"group_size": 1})
    assert config.reward.distils_alone
    measured = {"rewards": {"wise": TEACHER, "rule": {"function": "math", "weight": 0.0}}}
    assert make_config(reward=measured, servers={"there": {}}).reward.distils_alone
    assert not config_of().reward.distils_alone and not config_of(weight=0.0).reward.distils_alone
    with pytest.raises(ConfigError, match="every advantage would be 0"):
        make_config(reward={"min_group_size": 1}, trainer={"group_size": 1})
