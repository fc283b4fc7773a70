"""From groups to samples with advantages: shaping, rewards of turns, teachers, what depends on the batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sessions import make_segment, make_session
from tests.support.training import group_of_samples, make_score, plain_sample, trainer_config
from tests.support.trajectories import make_config
from tidemill.common.config.algorithm import TeacherTermConfig
from tidemill.common.config.algorithm_table import ADVANTAGES
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.advantages.estimators import gdpo
from tidemill.services.trainer.algorithm.advantages.shaping import with_shaped_reward, with_teacher
from tidemill.services.trainer.groups.group_filter import TrainableGroup
from tidemill.services.trainer.groups.samples import Sample, Teaching, TurnEnd, make_sample

REFERENCE = {"reference": {"model": "frozen"}}
LOG2 = np.log(2.0)


def assigner(**algorithm: Any) -> Advantages:
    """With completions of at most 10 tokens."""
    return Advantages(trainer_config(algorithm=algorithm, rollout__sampling={"max_tokens": 10}))


def assigned(advantages: Advantages, *groups: TrainableGroup) -> list[Sample]:
    return [sample for group in advantages.assign(groups) for sample in group.samples]


def group_of(ticket: int, *rewards: float, **fields: Any) -> TrainableGroup:
    return group_of_samples(ticket, *(plain_sample(ticket, i, r, **fields) for i, r in enumerate(rewards)))


def values_of(samples: list[Sample]) -> list[float]:
    """Of samples with one number each."""
    return [float(sample.advantage) for sample in samples]


def whitened(values: Any) -> Any:
    flat = np.array(values)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("gae", "gdpo", "remax")])
def test_only_batch_normalisation_waits_for_the_batch(name: str) -> None:
    advantages = assigner(advantage=name, pass_k=2)
    assert advantages.scope == ADVANTAGES[name].scope
    groups = [group_of(0, 1.0, 0.0), group_of(1, 3.0, 0.0), group_of(2, 1.0, 1.0)]
    together = values_of(assigned(advantages, *groups))
    alone = [value for one in groups for value in values_of(assigned(advantages, one))]
    assert (together == alone) is (advantages.scope == "group")


def test_opo_weighs_by_trained_tokens() -> None:
    masked = plain_sample(0, 1, 0.0, mask=np.array([True, False, False]))
    done = assigned(assigner(advantage="opo"), group_of_samples(0, plain_sample(0, 0, 1.0), masked))
    assert values_of(done) == [0.25, -0.75]  # baseline 3 / (3 + 1)


def test_gdpo_reads_the_rewards_of_the_scores_with_the_weights_of_the_config() -> None:
    rewards = {
        "right": {"function": "gsm8k", "weight": 2.0},
        "short": {"function": "exact_match", "weight": 0.5},
        "held_out": {"function": "math", "lanes": ["eval"]},
    }
    config = trainer_config(algorithm={"advantage": "gdpo"}, reward__rewards=rewards)
    components = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 0.0}]
    given = group_of(0, 0.0, 0.0, 0.0)
    for i, parts in enumerate(components):
        given.source.scores[i] = make_score(0, i, 0.0, components=parts | {"right/detail": 7.0})
    expected = gdpo([[(1.0, 0.0), (0.0, 1.0), (0.0, None)]], [2.0, 0.5]).tolist()
    assert values_of(assigned(Advantages(config), given)) == expected


def test_the_score_stays_what_it_was_and_the_order_of_samples_too() -> None:
    done = assigned(assigner(advantage="dr_grpo"), group_of(0, 1.0, 0.0))
    assert [(s.key, s.reward, s.advantage) for s in done] == [((0, 0), 1.0, 0.5), ((0, 1), 0.0, -0.5)]


def shaped_by(rewards: list[float], lengths: list[int], turns: Any = (), **algorithm: Any) -> Any:
    """What is taken off each reward, up to the group's mean; and whether the scores stay what they were."""
    samples = [plain_sample(0, i, r, n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    samples[0] = replace(samples[0], turns=turns)
    done = assigned(assigner(advantage="dr_grpo", **algorithm), group_of_samples(0, *samples))
    assert [sample.reward for sample in done] == rewards
    return np.array(values_of(done))


def centred(values: list[float]) -> Any:
    return np.array(values) - np.mean(values)


SOLVED = [1.0, 1.0, 0.0, 0.0]
TWO_TURNS = (TurnEnd(5, 0.0), TurnEnd(10, 0.0))


@pytest.mark.parametrize(
    ("rewards", "lengths", "algorithm", "shaped"),
    [
        # Of at most 10 tokens the last 5 are the buffer: 10 tokens cost 2, 6 cost 0.4, 5 nothing.
        ([2.0] * 3, [10, 6, 5], {"overlong": {"penalty": 2.0, "buffer_share": 0.5}}, [0.0, 1.6, 2.0]),
        # Half of the group is solved; the longest has 20 tokens, the first one two turns.
        (SOLVED, [10, 5, 20, 20], {"length_penalty": {"tokens": 0.2}}, [0.95, 0.975, -0.1, -0.1]),
        (
            SOLVED,
            [10, 5, 20, 20],
            {"length_penalty": {"tokens": 0.2, "of": "successes"}},
            [0.95, 0.975, 0.0, 0.0],
        ),
        (SOLVED, [10, 5, 20, 20], {"length_penalty": {"turns": 0.4}}, [0.8, 0.9, -0.1, -0.1]),
        (
            SOLVED,
            [10, 5, 20, 20],
            {"length_penalty": {"tokens": 0.2, "turns": 0.4}},
            [0.75, 0.875, -0.2, -0.2],
        ),
        ([0.0, 0.25], [10, 20], {"length_penalty": {"tokens": 0.2}}, [0.0, 0.25]),  # nothing is solved
    ],
)
def test_length_costs_reward_before_completions_are_compared(
    rewards: list[float], lengths: list[int], algorithm: dict[str, Any], shaped: list[float]
) -> None:
    found = shaped_by(rewards, lengths, TWO_TURNS if len(rewards) == 4 else (), **algorithm)
    np.testing.assert_allclose(found, centred(shaped), atol=1e-12)


def test_the_length_penalty_is_prime_rls_linear_one() -> None:
    """Its formula, a second time in torch and float32; with rewards of 0 and 1 the mean is the pass rate."""
    rng = np.random.default_rng(5)
    rewards, lengths = rng.integers(0, 2, 8).astype(float), rng.integers(1, 50, 8)
    found = shaped_by(rewards.tolist(), lengths.tolist(), length_penalty={"tokens": 0.25})
    r, n = torch.tensor(rewards, dtype=torch.float32), torch.tensor(lengths, dtype=torch.float32)
    shaped = r - r.mean() * 0.25 * (n / n.max())
    np.testing.assert_allclose(found, shaped - shaped.mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5), ("abs", 0.5)]
)
def test_kl_in_the_reward_is_summed_over_trained_tokens(estimator: str, value: float) -> None:
    # rollout - reference = 0.5 at each token, of which two of three are trained; beta 0.1
    far = {"reference_logprobs": np.full(3, -1.5, np.float32), "mask": np.array([True, False, True])}
    near = {"reference_logprobs": np.full(3, -1.0, np.float32)}
    kl = {"place": "reward", "estimator": estimator, "coefficient": 0.1}
    group = group_of_samples(0, plain_sample(0, 0, 1.0, **far), plain_sample(0, 1, 1.0, **near))
    done = assigned(assigner(advantage="dr_grpo", kl=kl, **REFERENCE), group)
    np.testing.assert_allclose(values_of(done), [-0.1 * value, 0.1 * value], atol=1e-7)


def test_reinforce_plus_plus_puts_the_penalty_on_the_tokens_that_follow_it() -> None:
    # Token rewards -0.5, 0, 1 - 0.5 => returns 0, 0.5, 0.5; and 0, 0, 0.
    kl = {"place": "reward", "estimator": "k1", "coefficient": 1.0}
    references = [np.array([-1.5, -1.0, -1.5], np.float32), np.full(3, -1.0, np.float32)]
    samples = [plain_sample(0, i, 1.0 - i, reference_logprobs=one) for i, one in enumerate(references)]
    advantages = assigner(advantage="reinforce_plus_plus", kl=kl, **REFERENCE)
    first, second = assigned(advantages, group_of_samples(0, *samples))
    expected = whitened([0.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(np.append(first.advantage, second.advantage), expected, atol=1e-6)
    assert first.mean_advantage == pytest.approx(expected[:3].mean())


def test_without_a_penalty_reinforce_plus_plus_has_one_number_for_a_sequence() -> None:
    half, none = np.array([False, True]), np.zeros(2, np.bool_)
    done = assigned(
        assigner(advantage="reinforce_plus_plus"),
        group_of_samples(0, plain_sample(0, 0, 1.0, 1), plain_sample(0, 1, 0.0, 2, mask=half)),
        group_of_samples(1, plain_sample(1, 0, 0.0, 1), plain_sample(1, 1, 5.0, 2, mask=none)),
    )
    # Over trained tokens only: 1, 0, 0; the masked sequence has no weight and no gradient.
    np.testing.assert_allclose(values_of(done), [*whitened([1.0, 0.0, 0.0]), 0.0])


def test_gae_goes_over_trained_tokens_and_whitening_takes_the_batch_and_leaves_the_values_targets() -> None:
    # The token in the middle is no action: rewards 0, 1, values 0.5, 0.25 as in the function's docstring.
    fields = {"values": np.array([0.5, 9.0, 0.25], np.float32), "mask": np.array([True, False, True])}
    plain = assigner(advantage="gae", value={"whiten": False}, gae_lambda=0.5)
    scaled = assigner(advantage="gae", gae_lambda=0.5)
    assert (plain.scope, scaled.scope) == ("group", "batch")
    groups = [group_of(t, float(t), **fields) for t in (1, 0, 2)]
    raw, done = assigned(plain, *groups), assigned(scaled, *groups)
    np.testing.assert_allclose(raw[0].advantage, [0.125, 0.0, 0.75])
    np.testing.assert_allclose(raw[0].returns, [0.625, 0.0, 1.0])  # type: ignore[arg-type]
    trained = [np.concatenate([np.asarray(s.advantage)[s.mask] for s in samples]) for samples in (raw, done)]
    np.testing.assert_allclose(trained[1], whitened(trained[0]))
    for mine, theirs in zip(done, raw, strict=True):
        np.testing.assert_array_equal(mine.returns, theirs.returns)


GAMMA, LAMBDA = 0.9, 0.8
VALUES = (0.5, -0.25, 0.125, 0.75, -1.0)
"""At the model's tokens of `session`."""


def session(index: int, reward: float, rewards: tuple[float | None, ...] = (1.0, None, -0.5)) -> Sample:
    """Turns of two, one and two tokens, the last in a segment of its own, with an answer between them."""
    first = make_segment((3, 4), (5, 6), (7, 8, 9), (10,), rewards=rewards[:2])
    made = make_session(0, index, first, make_segment((11,), (12, 13), rewards=rewards[2:]))
    values = np.zeros(8, np.float32)
    sample = make_sample(made, turn_weight=1.0)
    values[sample.mask] = VALUES
    return replace(sample, reward=reward, values=values)


def discounts(gamma: float, per: str) -> list[float]:
    """From each token of `session` to the next: turns end after tokens 1, 2 and 4."""
    return [gamma] * 5 if per == "token" else [1.0, gamma, gamma, 1.0, gamma]


class TestTurns:
    ALGORITHM = trainer_config().trainer.algorithm

    @pytest.mark.parametrize(
        ("rewards", "masked", "placed"),
        [
            ((1.0, None, -0.5), None, [0.0, 1.0, 0.0, 0.0, 2.0]),
            ((None, None, None), None, [0.0, 0.0, 0.0, 0.0, 3.0]),
            # Without the only token of the second turn, its reward is at the one before; of the first turn,
            # at the first token of all.
            ((1.0, 0.25, -0.5), 5, [0.0, 1.25, 0.0, 1.75]),
            ((1.0, None, -0.5), slice(0, 2), [1.0, 0.0, 2.0]),
            ((1.0, 0.25, -0.5), slice(None), []),
        ],
    )
    def test_rewards_stand_at_the_ends_of_their_turns_and_the_rest_at_the_end(
        self, rewards: Any, masked: Any, placed: list[float]
    ) -> None:
        sample = session(0, 3.0, rewards)
        mask = sample.mask.copy()
        if masked is not None:
            mask[masked] = False
        shaped = with_shaped_reward(replace(sample, mask=mask), self.ALGORITHM, 100)
        assert shaped.token_rewards_A is not None
        assert (shaped.token_rewards_A.tolist(), shaped.shaped_reward) == (placed, 3.0)

    @pytest.mark.parametrize("per", ["token", "turn"])
    def test_gae_is_the_recursion_over_the_models_tokens(self, per: str) -> None:
        advantages = assigner(
            advantage="gae", gamma=GAMMA, gamma_per=per, gae_lambda=LAMBDA, value={"whiten": False}
        )
        (sample,) = assigned(advantages, group_of_samples(0, session(0, 3.0)))
        rewards, expected, following = [0.0, 1.0, 0.0, 0.0, 2.0], [0.0] * 5, 0.0
        for t in range(4, -1, -1):
            discount = discounts(GAMMA, per)[t]
            next_value = VALUES[t + 1] if t < 4 else 0.0
            following = rewards[t] + discount * next_value - VALUES[t] + discount * LAMBDA * following
            expected[t] = following
        advantage_T, returns_T = np.asarray(sample.advantage), np.asarray(sample.returns)
        np.testing.assert_allclose(advantage_T[sample.mask], expected, rtol=1e-12)
        np.testing.assert_allclose(returns_T[sample.mask], np.add(expected, VALUES), rtol=1e-12)
        assert not advantage_T[~sample.mask].any()

    @pytest.mark.parametrize(("gamma", "per"), [(GAMMA, "token"), (GAMMA, "turn"), (1.0, "token")])
    def test_reinforce_plus_plus_whitens_the_returns_of_tokens(self, gamma: float, per: str) -> None:
        advantages = assigner(advantage="reinforce_plus_plus", gamma=gamma, gamma_per=per)
        samples = assigned(advantages, group_of_samples(0, session(0, 3.0), session(1, -1.0)))
        expected: list[float] = []
        for rest in (2.0, -2.0):  # of the score, less the turns' 1.0 and -0.5, and with the last turn's own
            following, returns = 0.0, [0.0] * 5
            for t, reward in reversed(list(enumerate([0.0, 1.0, 0.0, 0.0, rest]))):
                following = reward + discounts(gamma, per)[t] * following
                returns[t] = following
            expected += returns
        found = np.concatenate([np.asarray(s.advantage)[s.mask] for s in samples])
        np.testing.assert_allclose(found, whitened(expected), rtol=1e-9)

    def test_a_session_is_overlong_by_what_the_model_wrote_however_its_history_was_split(self) -> None:
        overlong = {"penalty": 1.0, "buffer_share": 0.5}
        algorithm = trainer_config(algorithm={"overlong": overlong}).trainer.algorithm
        whole = make_segment((3, 4), (5, 6), (7, 8, 9), (10,), (), (12, 13))
        samples = [session(0, 2.0), replace(make_sample(make_session(0, 0, whole)), reward=2.0)]
        # Of at most 8 tokens the last 4 are the buffer, and the model has written 5 of the 8.
        assert [with_shaped_reward(one, algorithm, 8).shaped_reward for one in samples] == [1.75, 1.75]

    def test_group_estimators_compare_the_scores_of_sessions(self) -> None:
        group = group_of_samples(0, session(0, 3.0), session(1, -1.0))
        assert values_of(assigned(assigner(advantage="dr_grpo"), group)) == [2.0, -2.0]

    def test_a_single_turn_is_one_turn(self) -> None:
        """Discounted per turn, its tokens are not discounted at all."""
        advantages = assigner(advantage="gae", gamma=GAMMA, gamma_per="turn", value={"whiten": False})
        plain = replace(session(0, 3.0), turns=(), forked=())
        (sample,) = assigned(advantages, group_of_samples(0, plain))
        assert np.asarray(sample.returns)[sample.mask].tolist() == pytest.approx([3.0] * 5)

    @pytest.mark.parametrize(
        ("algorithm", "expected"),
        [
            (
                {"advantage": "reinforce_plus_plus", "loss": "gspo", "old_logprobs": "rollout"},
                "one advantage",
            ),
            ({"overlong": {"penalty": 1.0}}, "rollout.environment.max_tokens"),
        ],
    )
    def test_what_does_not_fit_sessions_is_refused(self, algorithm: dict[str, Any], expected: str) -> None:
        with pytest.raises(ConfigError, match=expected):
            make_config(
                rollout={"environment": {"use": "my_env.py:MyEnv"}},
                reward={"rewards": {"game": {"environment": True}}},
                trainer={"algorithm": algorithm},
            )


def taught(rollout: list[float], teacher: list[float], weight: float = 1.0, **fields: Any) -> Sample:
    """By probabilities."""
    logprobs = np.log(np.array(rollout, np.float32))
    teaching = Teaching("wise", np.log(np.array(teacher, np.float32)), weight)
    return plain_sample(0, 0, 0.0, len(rollout), rollout_logprobs=logprobs, teaching=teaching, **fields)


class TestTeacher:
    @pytest.mark.parametrize(
        ("sample", "term", "expected"),
        [
            (taught([0.5, 0.2], [0.25, 0.4], 2.0), {"gamma": 0.0}, [-2 * LOG2, 2 * LOG2]),
            (taught([0.5, 0.2], [0.25, 0.4], 2.0), {"gamma": 0.5}, [-LOG2, 2 * LOG2]),
            (taught([0.5, 0.2], [0.25, 0.4], 2.0), {"gamma": 1.0}, [0.0, 2 * LOG2]),
            # Beside the outcome's advantage, and on the model's tokens alone.
            (
                taught([0.5, 0.9, 0.2], [0.25, 1.0, 0.4], mask=np.array([True, False, True]), advantage=3.0),
                {"gamma": 1.0},
                [3.0, 3.0, 3.0 + LOG2],
            ),
            (taught([0.9, 0.001], [1e-9, 0.9]), {"clip": 2.0}, [-2.0, 2.0]),
            (taught([0.5], [0.25], 0.0, advantage=1.5), {}, 1.5),
            (taught([0.5], [0.25], advantage=1.5), {"place": "loss"}, 1.5),
        ],
    )
    def test_reverse_kl_is_a_reward_for_each_token(
        self, sample: Sample, term: dict[str, Any], expected: Any
    ) -> None:
        found = with_teacher(sample, TeacherTermConfig(**term))
        np.testing.assert_allclose(found.advantage, expected, atol=1e-6)

    @pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus"])
    def test_every_advantage_has_the_teachers_part_added_as_it_is(self, name: str) -> None:
        plain = group_of(7, 1.0, 0.0)
        teaching = Teaching("wise", np.array([-1.25, -1.0, -0.5], np.float32), 0.5)
        given = replace(plain, samples=[replace(sample, teaching=teaching) for sample in plain.samples])
        advantages = assigner(advantage=name)
        for sample, outcome in zip(assigned(advantages, given), assigned(advantages, plain), strict=True):
            expected = outcome.advantage + 0.5 * np.array([-0.25, 0.0, 0.5])
            np.testing.assert_allclose(sample.advantage, expected, atol=1e-7)
