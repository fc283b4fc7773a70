"""On-policy distillation in the trainer: advantages, losses, filter and metrics, computed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import loss_of, make_tokens, tensor
from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import TeacherTermConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.advantages.teaching import with_teacher
from tidemill.services.trainer.algorithm.losses.corrections import teacher_kl
from tidemill.services.trainer.groups.group_filter import (
    BAD_NUMBERS,
    FEW_SCORES,
    MISSING_TEACHER,
    GroupFilter,
    PendingGroup,
    Refusal,
    TrainableGroup,
)
from tidemill.services.trainer.groups.samples import Sample, Teaching
from tidemill.services.trainer.metrics.step_metrics import stage_metrics, step_metrics
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.step import MiniBatch, StepResult

TEACHER: dict[str, Any] = {"teacher": {"servers": "there"}}
LOG2 = math.log(2.0)


def config_of(algorithm: dict[str, Any] | None = None, **teacher: Any) -> RunConfig:
    """Two samples a group, a rule and a teacher of all sources."""
    rewards = {"rule": {"function": "math"}, "wise": TEACHER | teacher}
    return trainer_config(reward__rewards=rewards, servers__there={}, algorithm=algorithm or {})


def sample_of(rollout: list[float], teacher: list[float], weight: float = 1.0, **fields: Any) -> Sample:
    size = len(rollout)
    values: dict[str, Any] = {
        "key": (0, 0),
        "prompt_ids": np.arange(2, dtype=np.int32),
        "completion_ids": np.arange(size, dtype=np.int32),
        "rollout_logprobs": np.log(np.array(rollout, np.float32)),
        "mask": np.ones(size, np.bool_),
        "reward": 0.0,
        "teaching": Teaching("wise", np.log(np.array(teacher, np.float32)), weight),
    }
    return Sample(**(values | fields))


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


ONE_OF_A_TOOL = {"mask": np.array([True, False, True]), "advantage": 3.0}


@pytest.mark.parametrize(
    ("rollout", "teacher", "fields", "term", "expected"),
    [
        ([0.5, 0.2], [0.25, 0.4], {"weight": 2.0}, {"gamma": 0.0}, [-2 * LOG2, 2 * LOG2]),
        ([0.5, 0.2], [0.25, 0.4], {"weight": 2.0}, {"gamma": 0.5}, [-LOG2, 2 * LOG2]),
        ([0.5, 0.2], [0.25, 0.4], {"weight": 2.0}, {"gamma": 1.0}, [0.0, 2 * LOG2]),
        # Beside the outcome's advantage, and on the model's tokens alone.
        ([0.5, 0.9, 0.2], [0.25, 1.0, 0.4], ONE_OF_A_TOOL, {"gamma": 1.0}, [3.0, 3.0, 3.0 + LOG2]),
        ([0.9, 0.001], [1e-9, 0.9], {}, {"clip": 2.0}, [-2.0, 2.0]),
    ],
)
def test_reverse_kl_is_a_reward_for_each_token(
    rollout: list[float],
    teacher: list[float],
    fields: dict[str, Any],
    term: dict[str, Any],
    expected: list[float],
) -> None:
    sample = with_teacher(sample_of(rollout, teacher, **fields), TeacherTermConfig(**term))
    np.testing.assert_allclose(sample.advantage, expected, atol=1e-6)


def test_a_teacher_without_weight_or_in_the_loss_changes_no_advantage() -> None:
    unweighed = sample_of([0.5], [0.25], weight=0.0, advantage=1.5)
    assert with_teacher(unweighed, TeacherTermConfig()) is unweighed
    in_loss = sample_of([0.5], [0.25], advantage=1.5)
    assert with_teacher(in_loss, TeacherTermConfig(place="loss")) is in_loss


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_plus_plus"])
def test_every_advantage_has_the_teachers_part_added_as_it_is(advantage: str) -> None:
    config = config_of({"advantage": advantage}, weight=0.5)
    found = GroupFilter(config).apply(group_of(1.0, 0.0), 5)
    assert isinstance(found, TrainableGroup)
    untaught = replace(found, samples=[replace(sample, teaching=None) for sample in found.samples])
    (group,), (plain,) = Advantages(config).assign([found]), Advantages(config).assign([untaught])
    for sample, outcome in zip(group.samples, plain.samples, strict=True):
        expected = outcome.advantage + 0.5 * np.array([0.25, 0.0, -0.5])
        np.testing.assert_allclose(sample.advantage, expected, atol=1e-7)


class TestLoss:
    """d = log 0.5 - log 0.25 = log 2, and log 0.25 - log 0.5 = -log 2."""

    def terms(self, **teacher: Any) -> tuple[Any, torch.Tensor]:
        tokens = make_tokens(
            [0.5, 0.25, 0.3],
            [0.5, 0.25, 0.3],
            [0.0, 0.0, 0.0],
            teacher_logprobs_N=torch.log(tensor(0.25, 0.5, 1.0)),
            teacher_weights_N=tensor(1.0, 2.0, 0.0),
        )
        terms = loss_of(tokens, teacher={"place": "loss"} | teacher)
        terms.loss.backward()
        assert tokens.logprobs_N.grad is not None
        return terms, tokens.logprobs_N.grad

    @pytest.mark.parametrize(
        ("estimator", "values", "slopes"),
        [
            ("k1", (LOG2, -LOG2), (LOG2, -LOG2)),
            ("k2", (LOG2**2 / 2, LOG2**2 / 2), (LOG2, -LOG2)),
            ("k3", (LOG2 - 0.5, 1.0 - LOG2), (0.5, -1.0)),
        ],
    )
    def test_value_and_gradient_by_hand(self, estimator: str, values: Any, slopes: Any) -> None:
        terms, gradient = self.terms(estimator=estimator)
        assert terms.loss.item() == pytest.approx(values[0] + 2 * values[1])
        np.testing.assert_allclose(gradient, [slopes[0], 2 * slopes[1], 0.0], atol=1e-12)
        assert terms.sums["teacher_kl_sum"].item() == pytest.approx(sum(values))
        assert terms.sums["teacher_tokens"].item() == 2

    def test_beyond_the_clip_a_token_keeps_the_gradient_of_the_bound(self) -> None:
        _, gradient = self.terms(clip=0.5)
        np.testing.assert_allclose(gradient, [0.5, -1.0, 0.0], atol=1e-12)

    def test_as_a_reward_it_is_no_term_of_the_loss(self) -> None:
        terms, gradient = self.terms(place="reward")
        assert terms.loss.item() == 0.0 and not gradient.any() and "teacher_kl_sum" not in terms.sums

    def test_over_all_tokens_the_gradient_is_that_of_the_divergence_itself(self) -> None:
        """An independent way: sum over the vocabulary, weighed by the policy's probabilities."""
        generator = torch.Generator().manual_seed(1)
        logits, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
        for estimator in ("k2", "k3"):
            logits.requires_grad_(True).grad = None
            policy_V, teacher_V = logits.log_softmax(-1), teacher.log_softmax(-1)
            term = TeacherTermConfig(place="loss", estimator=estimator)
            (policy_V.exp().detach() * teacher_kl(policy_V, teacher_V, term)).sum().backward()
            ours = logits.grad
            other = logits.detach().clone().requires_grad_(True)
            logp_V = other.log_softmax(-1)
            is_reverse = estimator == "k2"
            kl = (
                (logp_V.exp() * (logp_V - teacher_V))
                if is_reverse
                else teacher_V.exp() * (teacher_V - logp_V)
            )
            kl.sum().backward()
            torch.testing.assert_close(ours, other.grad, rtol=1e-9, atol=1e-12)


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
        group = replace_scores(group_of(1.0, 0.0), scores)
        refused = GroupFilter(config_of()).apply(group, 5)
        assert isinstance(refused, Refusal) and refused.reason == FEW_SCORES
        one = trainer_config(reward__min_group_size=1, reward__rewards={"wise": TEACHER}, servers__there={})
        mixed = {0: scores[0], 1: group_of(0.0, 0.0).scores[1]}
        found = GroupFilter(one).apply(replace_scores(group, mixed), 5)
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


def replace_scores(group: PendingGroup, scores: Any) -> PendingGroup:
    return replace(group, scores=scores)


def test_the_step_says_how_far_the_policy_is_from_each_teacher() -> None:
    config = config_of()
    found = GroupFilter(config).apply(group_of(1.0, 0.0), 5)
    assert isinstance(found, TrainableGroup)
    update = UpdateResult(grad_norm=1.0, lr=0.1, skipped=False)
    result = StepResult([found], [MiniBatch(update=update)])
    metrics = step_metrics(5, result, 0, 1.0)
    # -0.5 + 0.25, 0, -0.5 + 1: twice
    assert metrics["teacher/wise/reverse_kl"] == pytest.approx(0.25 / 3)
    assert metrics["teacher/wise/tokens"] == 6.0
    assert metrics["frac_reward_zero_std"] == 0.0
    plain = stage_metrics(list(found.source.trajectories.values()), [make_score(7, 0)])
    assert metrics["stages/record_bytes"] == plain["stages/record_bytes"] + 4 * 3


def test_groups_that_a_teacher_counts_for_are_not_without_a_lesson() -> None:
    for weight, expected in ((1.0, 0.0), (0.0, 1.0)):
        found = GroupFilter(config_of(weight=weight)).apply(group_of(1.0, 1.0), 5)
        assert isinstance(found, TrainableGroup)
        update = UpdateResult(grad_norm=1.0, lr=0.1, skipped=False)
        metrics = step_metrics(5, StepResult([found], [MiniBatch(update=update)]), 0, 1.0)
        assert metrics["frac_reward_zero_std"] == expected


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
            {
                "reward": {
                    "rewards": {
                        "wise": {"teacher": TEACHER["teacher"] | {"prompt_column": "a", "template": "b"}}
                    }
                }
            },
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
