"""Advantages and losses of the user's own: what they are given, and how their mistakes are said."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.losses import loss_of, make_tokens, tensor
from tests.support.samples import assigned
from tests.support.training import group_of_samples, plain_sample, trainer_config
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss
from tidemill.services.trainer.groups.sample import Sample

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path):
    """Writes a file of the user's and returns the name of the function in it."""

    def write(text):
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path / 'mine.py'}:{'loss' if 'loss' in text else 'advantage'}"

    return write


def advantage_of(sample: Sample) -> float | list[float]:
    """One number, or one for each token."""
    if sample.advantage is not None:
        return sample.advantage
    return sample.columns["advantages"].tolist()


@pytest.mark.parametrize(
    ("text", "scope", "expected"),
    [
        ("def advantage(rewards):\n    return rewards - rewards.max()\n", "group", [[0.0], [0.0, -0.75]]),
        ("def advantage(rewards, tickets):\n    return rewards * tickets\n", "batch", [[4.0], [5.0, 1.25]]),
        (
            "import numpy as np\ndef advantage(rewards, samples):\n"
            "    return [r * np.arange(len(s.completion_ids)) for r, s in zip(rewards, samples)]\n",
            "group",
            [[[0.0, 0.0, 4.0]], [[0.0, 0.0, 2.0], [0.0, 0.0, 0.5]]],
        ),
    ],
    ids=["of one group by rewards", "of a batch by tickets", "of each token by samples"],
)
def test_an_advantage_is_given_what_it_takes(write, text, scope, expected):
    advantages = Advantages(trainer_config(algorithm={"advantage": write(text)}))
    assert advantages.scope == scope
    mask = np.array([True, False, True])
    rewards = {2: [2.0], 5: [1.0, 0.25]}
    groups = []
    for ticket, of_group in rewards.items():
        samples = [plain_sample(ticket, i, reward, mask=mask) for i, reward in enumerate(of_group)]
        groups.append(group_of_samples(ticket, *samples))
    assert [list(map(advantage_of, group.samples)) for group in assigned(advantages, *groups)] == expected


@pytest.mark.parametrize(
    ("text", "fields", "gradient"),
    [
        ("def loss(ratio):\n    return 2 * ratio.ratio_N * ratio.advantages_N\n", {}, [-3.0, 6.0]),
        ("def loss(ratio, algorithm):\n    return algorithm.clip_high * ratio.logprobs_N\n",
         {"clip_high": 7.0}, [-7.0, -7.0]),
    ],
)  # fmt: skip
def test_a_loss_is_given_what_it_takes(write, text, fields, gradient):
    tokens = make_tokens([0.6, 0.9], [0.4, 0.3], [1.0, -1.0])
    loss_of(tokens, loss=write(text), old_logprobs="rollout", **fields).loss.backward()
    np.testing.assert_allclose(tokens.logprobs_N.grad, gradient)


REFERENCE = {"reference": {"model": "frozen"}}
COLUMNS = {
    "reference_logprobs": REFERENCE,
    "values": {"advantage": "gae"},
    "returns": {"advantage": "gae"},
    "factors": {"top_entropy_quantile": 0.5},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_loss_has_the_columns_that_its_config_brings_and_no_others(write, name):
    """Also where a pass has only demonstrations, which bring none of them."""
    loss = write(f"def loss(ratio):\n    return ratio.ratio_N * ratio.columns['{name}']\n")
    with pytest.raises(ConfigError, match=f"KeyError: '{name}'"):
        find_loss(AlgorithmConfig(loss=loss))
    algorithm = AlgorithmConfig(loss=loss, **COLUMNS[name])
    surrogate = find_loss(algorithm)
    plain = make_tokens([0.5, 0.25], [0.5, 0.25], [0.0, 0.0], log_N=tensor(0.0, 0.0))
    absent = {"factors": [1.0, 1.0], "reference_logprobs": plain.logprobs_N.tolist()}.get(name, [0.0, 0.0])
    assert surrogate(plain, algorithm).objective_N.tolist() == pytest.approx(absent)
    held = replace(plain, columns=plain.columns | {name: tensor(3.0, 4.0)})
    assert surrogate(held, algorithm).objective_N.tolist() == pytest.approx([3.0, 4.0])


def test_a_loss_sees_the_teachers_logprobs_and_weights_which_are_0_without_one(write):
    loss = write(
        "def loss(ratio):\n"
        "    return ratio.ratio_N + ratio.teacher_weights_N * ratio.columns['teacher_logprobs']\n"
    )
    algorithm = AlgorithmConfig(loss=loss)
    plain = make_tokens([0.5, 0.25], [0.5, 0.25], [0.0, 0.0], log_N=tensor(0.0, 0.0))
    taught = replace(
        plain,
        columns=plain.columns | {"teacher_logprobs": tensor(-3.0, 0.0)},
        teacher_weights_N=tensor(2.0, 0.0),
    )
    surrogate = find_loss(algorithm)
    assert surrogate(plain, algorithm).objective_N.tolist() == [1.0, 1.0]
    assert surrogate(taught, algorithm).objective_N.tolist() == [-5.0, 1.0]


def test_a_loss_that_reads_the_reference_trains_demonstrations_alone(write):
    """Broken, the first pass without a sampled token would end the run."""
    loss = write("def loss(ratio):\n    return ratio.log_N - ratio.columns['reference_logprobs']\n")
    tokens = make_tokens([0.5, 0.25], [0.5, 0.25], [0.0, 0.0], imitation_N=tensor(1.0, 1.0))
    loss_of(tokens, loss=loss, **REFERENCE).loss.backward()
    np.testing.assert_allclose(tokens.logprobs_N.grad, [-1.0, -1.0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("advantage = 1\n", "is no function"),
        ("", "has no function 'advantage'"),
        ("def advantage(x):\n    return x\n", "expected arguments among"),
        ("def advantage(rewards):\n    return rewards[:1]\n", "1 advantages for 2 rewards"),
        ("def advantage(rewards):\n    return rewards / 0 * 0\n", "must be finite"),
        ("def advantage(rewards):\n    return 'no'\n", "could not convert"),
        ("def advantage(rewards):\n    raise KeyError('x')\n", "KeyError"),
        ("def advantage(rewards):\n    return eval('1 +')\n", "(<string>, line 1) (mine.py, line 2)"),
        ("def advantage(rewards):\n    return [[1, 2], [1, 2]]\n", "expected one number, or one"),
        ("import nowhere_to_be_found\n", "No module named"),
        ("def advantage(:\n", "line 1"),
        ("def loss(ratio):\n    return ratio.log_N.sum()\n", "objective of each token"),
        ("def loss(ratio):\n    return ratio.log_N.detach()\n", "without a gradient"),
        ("def loss(ratio):\n    return ratio.log_N / 0\n", "not finite"),
        ("def loss(ratio):\n    return ratio.nothing\n", "AttributeError"),
        ("def loss(logprobs):\n    return logprobs\n", "expected arguments among"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_mistakes_are_found_at_the_start_and_name_the_function(write, text, says):
    name = write(text)
    kind = name.rpartition(":")[2]
    with pytest.raises(ConfigError, match=rf"trainer\.algorithm\.{kind} .*mine\.py:{kind}") as caught:
        if kind == "loss":
            find_loss(AlgorithmConfig(loss=name))
        else:
            Advantages(trainer_config(algorithm={"advantage": name}))
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.py does not exist on this machine"):
        Advantages(trainer_config(algorithm={"advantage": f"{tmp_path / 'gone.py'}:f"}))
