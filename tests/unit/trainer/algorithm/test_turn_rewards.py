"""Rewards of single turns: where they stand, and what GAE and REINFORCE++ make of them, by plain loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.sessions import make_segment, make_session
from tests.support.training import trainer_config
from tests.support.trajectories import make_config
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.advantages.episode import make_episode
from tidemill.services.trainer.groups.group_filter import PendingGroup, TrainableGroup
from tidemill.services.trainer.groups.samples import Sample, make_sample

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


def assigned(*samples: Sample, **algorithm: Any) -> list[Sample]:
    advantages = Advantages(trainer_config(algorithm=algorithm))
    (group,) = advantages.assign([TrainableGroup(PendingGroup(0, 0, {}, {}), list(samples), [])])
    return group.samples


def discounts(per: str) -> list[float]:
    """From each token of `session` to the next: turns end after tokens 1, 2 and 4."""
    return [GAMMA] * 5 if per == "token" else [1.0, GAMMA, GAMMA, 1.0, GAMMA]


def test_turn_rewards_stand_at_the_ends_of_their_turns_and_the_rest_at_the_end() -> None:
    algorithm = trainer_config().trainer.algorithm
    placed = make_episode(session(0, 3.0), algorithm, 100)
    assert placed.token_rewards_A.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]
    assert placed.token_rewards_A.sum() == placed.reward == 3.0
    alone = make_episode(session(0, 3.0, (None, None, None)), algorithm, 100)
    assert alone.token_rewards_A.tolist() == [0.0, 0.0, 0.0, 0.0, 3.0]


def test_a_turn_without_a_trained_token_gives_its_reward_to_the_one_before() -> None:
    sample = session(0, 3.0, (1.0, 0.25, -0.5))
    mask = sample.mask.copy()
    mask[5] = False  # the only token of the second turn
    placed = make_episode(replace(sample, mask=mask), trainer_config().trainer.algorithm, 100)
    assert placed.token_rewards_A.tolist() == [0.0, 1.25, 0.0, 1.75]
    nothing = make_episode(replace(sample, mask=np.zeros_like(mask)), trainer_config().trainer.algorithm, 100)
    assert (nothing.token_rewards_A.tolist(), nothing.reward) == ([], 3.0)


@pytest.mark.parametrize("per", ["token", "turn"])
def test_gae_is_the_recursion_over_the_models_tokens(per: str) -> None:
    (sample,) = assigned(
        session(0, 3.0),
        advantage="gae",
        gamma=GAMMA,
        gamma_per=per,
        gae_lambda=LAMBDA,
        value={"whiten": False},
    )
    rewards, expected, following = [0.0, 1.0, 0.0, 0.0, 2.0], [0.0] * 5, 0.0
    for t in range(4, -1, -1):
        discount = discounts(per)[t]
        next_value = VALUES[t + 1] if t < 4 else 0.0
        following = rewards[t] + discount * next_value - VALUES[t] + discount * LAMBDA * following
        expected[t] = following
    np.testing.assert_allclose(np.asarray(sample.advantage)[sample.mask], expected, rtol=1e-12)
    assert sample.returns is not None
    np.testing.assert_allclose(sample.returns[sample.mask], np.add(expected, VALUES), rtol=1e-12)
    assert not np.asarray(sample.advantage)[~sample.mask].any()


@pytest.mark.parametrize(("gamma", "per"), [(GAMMA, "token"), (GAMMA, "turn"), (1.0, "token")])
def test_reinforce_plus_plus_whitens_the_returns_of_tokens(gamma: float, per: str) -> None:
    samples = assigned(
        session(0, 3.0), session(1, -1.0), advantage="reinforce_plus_plus", gamma=gamma, gamma_per=per
    )
    expected: list[float] = []
    for rest in (2.0, -2.0):  # of the score, less the turns' 1.0 and -0.5, and with the last turn's own
        following, returns = 0.0, [0.0] * 5
        for t, reward in reversed(list(enumerate([0.0, 1.0, 0.0, 0.0, rest]))):
            following = reward + (discounts(per)[t] if gamma < 1.0 else 1.0) * following
            returns[t] = following
        expected += returns
    whitened = (np.array(expected) - np.mean(expected)) / np.sqrt(np.var(expected, ddof=1) + 1e-8)
    found = np.concatenate([np.asarray(s.advantage)[s.mask] for s in samples])
    np.testing.assert_allclose(found, whitened, rtol=1e-9)


def test_a_session_is_overlong_by_what_the_model_wrote_however_its_history_was_split() -> None:
    algorithm = trainer_config(
        algorithm={"overlong": {"penalty": 1.0, "buffer_share": 0.5}}
    ).trainer.algorithm
    whole = make_segment((3, 4), (5, 6), (7, 8, 9), (10,), (), (12, 13))
    samples = [session(0, 2.0), replace(make_sample(make_session(0, 0, whole)), reward=2.0)]
    # Of at most 8 tokens the last 4 are the buffer, and the model has written 5 of the 8.
    assert [make_episode(sample, algorithm, 8).reward for sample in samples] == [1.75, 1.75]


def test_group_estimators_compare_the_scores_of_sessions() -> None:
    one, other = assigned(session(0, 3.0), session(1, -1.0), advantage="dr_grpo")
    assert (one.advantage, other.advantage) == (2.0, -2.0)


def test_a_single_turn_is_one_turn() -> None:
    """Discounted per turn, its tokens are not discounted at all."""
    plain = replace(session(0, 3.0), turns=(), forked=())
    (sample,) = assigned(plain, advantage="gae", gamma=GAMMA, gamma_per="turn", value={"whiten": False})
    assert sample.returns is not None
    assert sample.returns[sample.mask].tolist() == pytest.approx([3.0 * 1.0] * 4 + [3.0])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"advantage": "reinforce_plus_plus", "loss": "gspo", "old_logprobs": "rollout"}, "one advantage"),
        ({"overlong": {"penalty": 1.0}}, "rollout.environment.max_tokens"),
    ],
)
def test_what_does_not_fit_sessions_is_refused(algorithm: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_config(
            rollout={"environment": {"use": "my_env.py:MyEnv"}},
            reward={"rewards": {"game": {"environment": True}}},
            trainer={"algorithm": algorithm},
        )
