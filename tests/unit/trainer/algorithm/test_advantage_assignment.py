"""From groups to samples with advantages: shaping, KL in the reward, what depends on the whole batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.training import trainer_config
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.advantages.batch_scaled import gdpo
from tidemill.services.trainer.groups.group_filter import PendingGroup, TrainableGroup
from tidemill.services.trainer.groups.samples import Sample, TurnEnd

REFERENCE = {"reference": {"model": "frozen"}}


def assigner(**algorithm: Any) -> Advantages:
    """With completions of at most 10 tokens."""
    return Advantages(trainer_config(algorithm=algorithm, rollout__sampling={"max_tokens": 10}))


def sample(ticket: int, index: int, reward: float, num_tokens: int = 3, **fields: Any) -> Sample:
    values: dict[str, Any] = {
        "key": (ticket, index),
        "prompt_ids": np.arange(2, dtype=np.int32),
        "completion_ids": np.arange(num_tokens, dtype=np.int32),
        "rollout_logprobs": np.full(num_tokens, -1.0, np.float32),
        "mask": np.ones(num_tokens, np.bool_),
        "reward": reward,
    }
    return Sample(**(values | fields))


def group(ticket: int, *samples: Sample) -> TrainableGroup:
    return TrainableGroup(PendingGroup(ticket, 0, {}, {}), list(samples), [s.reward for s in samples])


def assigned(advantages: Advantages, *groups: TrainableGroup) -> list[Sample]:
    return [sample for group in advantages.assign(groups) for sample in group.samples]


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("grpo", "group"),
        ("dr_grpo", "group"),
        ("rloo", "group"),
        ("pass_at_k", "group"),
        ("reinforce_plus_plus", "batch"),
        ("reinforce_plus_plus_baseline", "batch"),
        ("opo", "group"),
        ("max_rl", "group"),
        ("grpo_passk", "group"),
        ("dr_grpo_passk", "group"),
        ("grpo_batch", "batch"),
        ("scale_rl", "batch"),
    ],
)
def test_only_batch_normalisation_waits_for_the_batch(name, scope):
    advantages = assigner(advantage=name, pass_k=2)
    assert advantages.scope == scope
    groups = [group(0, sample(0, 0, 1.0), sample(0, 1, 0.0)), group(1, sample(1, 0, 3.0), sample(1, 1, 0.0))]
    together = [s.advantage for s in assigned(advantages, *groups)]
    alone = [s.advantage for one in groups for s in assigned(advantages, one)]
    assert (together == alone) is (scope == "group")


def test_opo_weighs_by_trained_tokens():
    masked = sample(0, 1, 0.0, 3, mask=np.array([True, False, False]))
    done = assigned(assigner(advantage="opo"), group(0, sample(0, 0, 1.0, 3), masked))
    assert [s.advantage for s in done] == [0.25, -0.75]  # baseline 3 / (3 + 1)


def test_gpg_looks_at_all_groups_of_the_mini_batch():
    idle = group(1, sample(1, 0, 1.0), sample(1, 1, 1.0))
    done = assigned(assigner(advantage="gpg"), group(0, sample(0, 0, 1.0), sample(0, 1, 0.0)), idle)
    assert [s.advantage for s in done] == [1.0, -1.0, 0.0, 0.0]


def test_gdpo_reads_the_rewards_of_the_scores_with_the_weights_of_the_config():
    rewards = {
        "right": {"function": "gsm8k", "weight": 2.0},
        "short": {"function": "exact_match", "weight": 0.5},
        "held_out": {"function": "math", "lanes": ["eval"]},
    }
    config = trainer_config(algorithm={"advantage": "gdpo"}, reward__rewards=rewards)
    values = {0: {"right": 1.0, "short": 0.0}, 1: {"right": 0.0, "short": 1.0}, 2: {"right": 0.0}}
    status, detail = ScoreStatus.OK, {"right/detail": 7.0}
    scores = {
        i: Score(ticket=0, index=i, status=status, value=0.0, components=parts | detail)
        for i, parts in values.items()
    }
    samples = [sample(0, i, 0.0) for i in values]
    given = TrainableGroup(PendingGroup(0, 0, {}, scores), samples, [0.0] * 3)
    done = assigned(Advantages(config), given)
    parts = [[(1.0, 0.0), (0.0, 1.0), (0.0, None)]]
    assert [s.advantage for s in done] == gdpo(parts, [2.0, 0.5]).tolist()


def test_the_score_stays_what_it_was_and_the_order_of_samples_too():
    given = group(0, sample(0, 0, 1.0), sample(0, 1, 0.0))
    done = assigned(assigner(advantage="dr_grpo"), given)
    assert [(s.key, s.reward, s.advantage) for s in done] == [((0, 0), 1.0, 0.5), ((0, 1), 0.0, -0.5)]


def test_overlong_completions_lose_reward_before_they_are_compared():
    # Of at most 10 tokens the last 5 are the buffer: 10 tokens cost 2, 6 cost 0.4, 5 nothing.
    advantages = assigner(advantage="dr_grpo", overlong={"penalty": 2.0, "buffer_share": 0.5})
    done = assigned(advantages, group(0, *(sample(0, i, 2.0, n) for i, n in enumerate((10, 6, 5)))))
    shaped = np.array([0.0, 1.6, 2.0])
    np.testing.assert_allclose([s.advantage for s in done], shaped - shaped.mean())
    assert [s.reward for s in done] == [2.0] * 3


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({"tokens": 0.2}, [0.05, 0.025, 0.1, 0.1]),
        ({"tokens": 0.2, "of": "successes"}, [0.05, 0.025, 0.0, 0.0]),
        ({"turns": 0.4}, [0.2, 0.1, 0.1, 0.1]),
        ({"tokens": 0.2, "turns": 0.4}, [0.25, 0.125, 0.2, 0.2]),
    ],
)
def test_length_costs_more_where_more_is_solved(penalty, expected):
    # Half of the group is solved; the longest has 20 tokens, the first one two turns.
    turns = {"turns": (TurnEnd(5, 0.0), TurnEnd(10, 0.0))}
    given = group(
        *(0, sample(0, 0, 1.0, 10, **turns), sample(0, 1, 1.0, 5)),
        *(sample(0, 2, 0.0, 20), sample(0, 3, 0.0, 20)),
    )
    advantages = assigner(advantage="dr_grpo", length_penalty=penalty)
    shaped = np.array([1.0, 1.0, 0.0, 0.0]) - expected
    done = assigned(advantages, given)
    np.testing.assert_allclose([s.advantage for s in done], shaped - shaped.mean(), atol=1e-12)
    assert [s.reward for s in done] == [1.0, 1.0, 0.0, 0.0]
    unsolved = group(1, sample(1, 0, 0.0, 10), sample(1, 1, 0.25, 20))
    assert [s.advantage for s in assigned(advantages, unsolved)] == [-0.125, 0.125]


def test_the_length_penalty_is_prime_rls_linear_one():
    """Its formula, a second time in torch and float32; with rewards of 0 and 1 the mean is the pass rate."""
    rng = np.random.default_rng(5)
    rewards, lengths = rng.integers(0, 2, 8).astype(float), rng.integers(1, 50, 8)
    given = group(0, *(sample(0, i, rewards[i], int(lengths[i])) for i in range(8)))
    done = assigned(assigner(advantage="dr_grpo", length_penalty={"tokens": 0.25}), given)
    r, n = torch.tensor(rewards, dtype=torch.float32), torch.tensor(lengths, dtype=torch.float32)
    shaped = r - r.mean() * 0.25 * (n / n.max())
    np.testing.assert_allclose([s.advantage for s in done], shaped - shaped.mean(), rtol=1e-6, atol=1e-6)


def test_kl_in_the_reward_is_summed_over_trained_tokens():
    # rollout - reference = 0.5 at each token; beta 0.1; two of three tokens are trained: 0.1 * 2 * 0.5 = 0.1
    far = {"reference_logprobs": np.full(3, -1.5, np.float32), "mask": np.array([True, False, True])}
    near = {"reference_logprobs": np.full(3, -1.0, np.float32)}
    advantages = assigner(
        advantage="dr_grpo", kl={"place": "reward", "estimator": "k1", "coefficient": 0.1}, **REFERENCE
    )
    done = assigned(advantages, group(0, sample(0, 0, 1.0, **far), sample(0, 1, 1.0, **near)))
    np.testing.assert_allclose([s.advantage for s in done], [-0.05, 0.05], atol=1e-7)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)])
def test_kl_estimators_in_the_reward(estimator, value):
    far = sample(0, 0, 0.0, 1, reference_logprobs=np.array([-1.5], np.float32))
    near = sample(0, 1, 0.0, 1, reference_logprobs=np.array([-1.0], np.float32))
    kl = {"place": "reward", "estimator": estimator, "coefficient": 1.0}
    done = assigned(assigner(advantage="dr_grpo", kl=kl, **REFERENCE), group(0, far, near))
    assert done[1].advantage == pytest.approx(value / 2, abs=1e-6)


def test_reinforce_plus_plus_puts_the_penalty_on_the_tokens_that_follow_it():
    # Token rewards -0.5, 0, 1 - 0.5 => returns 0, 0.5, 0.5; and 0, 0, 0.
    reference = np.array([-1.5, -1.0, -1.5], np.float32)
    kl = {"place": "reward", "estimator": "k1", "coefficient": 1.0}
    advantages = assigner(advantage="reinforce_plus_plus", kl=kl, **REFERENCE)
    first, second = assigned(
        advantages,
        group(
            0,
            sample(0, 0, 1.0, reference_logprobs=reference),
            sample(0, 1, 0.0, reference_logprobs=np.full(3, -1.0, np.float32)),
        ),
    )
    flat = np.array([0.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    expected = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate([first.advantage, second.advantage]), expected, atol=1e-6)
    assert first.mean_advantage == pytest.approx(expected[:3].mean())


def test_without_a_penalty_reinforce_plus_plus_has_one_number_for_a_sequence():
    done = assigned(
        assigner(advantage="reinforce_plus_plus"),
        group(0, sample(0, 0, 1.0, 1), sample(0, 1, 0.0, 2, mask=np.array([False, True]))),
        group(1, sample(1, 0, 0.0, 1), sample(1, 1, 5.0, 2, mask=np.zeros(2, np.bool_))),
    )
    # Over trained tokens only: 1, 0, 0; the masked sequence has no weight and no gradient.
    flat = np.array([1.0, 0.0, 0.0])
    expected = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
    np.testing.assert_allclose([s.advantage for s in done[:3]], expected)
    assert done[3].advantage == 0.0


class TestGae:
    VALUES = np.array([0.5, 9.0, 0.25], np.float32)
    MASK = np.array([True, False, True])

    def test_goes_over_trained_tokens_and_fills_in_the_values_targets(self):
        # The token in the middle is no action: rewards 0, 1, values 0.5, 0.25 as in the function's docstring.
        advantages = assigner(advantage="gae", value={"whiten": False}, gae_lambda=0.5)
        assert advantages.scope == "group"
        (done,) = assigned(advantages, group(0, sample(0, 0, 1.0, values=self.VALUES, mask=self.MASK)))
        np.testing.assert_allclose(done.advantage, [0.125, 0.0, 0.75])
        np.testing.assert_allclose(done.returns, [0.625, 0.0, 1.0])

    def test_whitening_takes_the_whole_batch_and_leaves_the_targets(self):
        plain = assigner(advantage="gae", value={"whiten": False})
        whitened = assigner(advantage="gae")
        assert whitened.scope == "batch"
        groups = [group(t, sample(t, 0, float(t), values=self.VALUES)) for t in range(3)]
        raw = np.concatenate([s.advantage for s in assigned(plain, *groups)])
        done = assigned(whitened, *groups)
        scaled = np.concatenate([s.advantage for s in done])
        np.testing.assert_allclose(scaled, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8))
        for mine, theirs in zip(done, assigned(plain, *groups), strict=True):
            np.testing.assert_array_equal(mine.returns, theirs.returns)


def test_a_sample_refuses_numbers_that_do_not_fit_its_tokens():
    good = sample(0, 0, 1.0)
    with pytest.raises(ValueError, match="values of shape"):
        replace(good, values=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="must be finite"):
        replace(good, advantage=np.array([0.0, np.nan, 0.0]))


class TestUsersOwn:
    def write(self, folder: Path, text: str) -> str:
        (folder / "mine.py").write_text(text)
        return f"{folder / 'mine.py'}:advantage"

    def test_of_one_group_by_rewards(self, tmp_path):
        name = self.write(tmp_path, "def advantage(rewards):\n    return rewards - rewards.max()\n")
        advantages = assigner(advantage=name)
        assert advantages.scope == "group"
        done = assigned(advantages, group(0, sample(0, 0, 1.0), sample(0, 1, 0.25)))
        assert [s.advantage for s in done] == [0.0, -0.75]

    def test_of_a_batch_by_tickets(self, tmp_path):
        name = self.write(tmp_path, "def advantage(rewards, tickets):\n    return rewards * tickets\n")
        advantages = assigner(advantage=name)
        assert advantages.scope == "batch"
        done = assigned(advantages, group(2, sample(2, 0, 1.0)), group(5, sample(5, 0, 2.0)))
        assert [s.advantage for s in done] == [2.0, 10.0]

    def test_of_each_token_by_samples(self, tmp_path):
        text = "import numpy as np\ndef advantage(rewards, samples):\n"
        text += "    return [r * np.arange(len(s.completion_ids)) for r, s in zip(rewards, samples)]\n"
        mask = np.array([True, False, True])
        (done,) = assigned(
            assigner(advantage=self.write(tmp_path, text)), group(0, sample(0, 0, 3.0, mask=mask))
        )
        assert done.advantage.tolist() == [0.0, 0.0, 6.0]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "has no function 'advantage'"),
            ("def advantage(x):\n    return x\n", "expected arguments among"),
            ("def advantage(rewards):\n    return rewards[:1]\n", "1 advantages for 2 rewards"),
            ("def advantage(rewards):\n    return rewards / 0 * 0\n", "must be finite"),
            ("def advantage(rewards):\n    return 'no'\n", "could not convert"),
            ("def advantage(rewards):\n    raise KeyError('x')\n", "KeyError"),
            (
                "def advantage(rewards):\n    return [[1, 2], [1, 2]]\n",
                "expected one number, or one",
            ),
            ("import nowhere_to_be_found\n", "No module named"),
            ("def advantage(:\n", "line 1"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
    def test_mistakes_are_found_at_the_start_and_name_the_function(self, tmp_path, text, says):
        with pytest.raises(
            ConfigError, match=r"trainer\.algorithm\.advantage .*mine\.py:advantage"
        ) as caught:
            assigner(advantage=self.write(tmp_path, text))
        assert says in str(caught.value)

    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"gone\.py does not exist on this machine"):
            assigner(advantage=f"{tmp_path / 'gone.py'}:f")
