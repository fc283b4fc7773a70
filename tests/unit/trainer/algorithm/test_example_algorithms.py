"""Advantages of examples/algorithms: their numbers are those of the time when they were built in."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.support import samples as samples_support
from tests.support.example_algorithms import EXAMPLES, example, scale_rl_settings
from tests.support.training import group_of_samples, plain_sample, trainer_config
from tidemill.common.config import load_recorded, parse_config
from tidemill.common.config.algorithms import moved
from tidemill.common.config.algorithms.moved import ADVANTAGES_MOVED, PRESETS_MOVED
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages import Advantages

GENERATOR = np.random.default_rng(7)
GROUPS = [GENERATOR.random(size).round(2).tolist() for size in (4, 3, 6, 2)] + [[0.4] * 4, [1.0]]
EPSILON = 1e-4


def advantages_of(name: str, groups: list[list[float]]) -> tuple[str, list[float]]:
    """The scope and the advantages that a run with the example gives to groups with these rewards."""
    config = trainer_config(algorithm={"advantage": example(ADVANTAGES_MOVED[name])})
    advantages = Advantages(config)
    filled = []
    for ticket, rewards in enumerate(groups):
        samples = [plain_sample(ticket, i, reward) for i, reward in enumerate(rewards)]
        filled.append(group_of_samples(ticket, *samples))
    done = samples_support.assigned(advantages, *filled)
    return advantages.scope, [float(sample.advantage) for group in done for sample in group.samples]


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        # two are best: either can be missed
        ("dr_grpo_passk", [[1, 3, 0], [1, 0, 1]], [0.0, 2.0, 0.0, 0.0, 0.0, 0.0]),
        # variance ((1 - 4/3)^2 + (3 - 4/3)^2 + (4/3)^2) / 2 = 7/3
        ("grpo_passk", [[1, 3, 0]], [0.0, 2 / (math.sqrt(7 / 3) + EPSILON), 0.0]),
        # 0.5, -0.5, 1.5, -1.5: mean 0, squares 5, variance 5/3
        ("scale_rl", [[1, 0], [3, 0]], np.array([0.5, -0.5, 1.5, -1.5]) / (math.sqrt(5 / 3) + EPSILON)),
        # the weight of idle groups goes to the others
        ("gpg", [[1, 0], [1, 1]], [1.0, -1.0, 0.0, 0.0]),
    ],
)
def test_worked_examples(name, groups, expected):
    _, values = advantages_of(name, groups)
    np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-8)


def test_they_wait_for_what_they_compare():
    scopes = {name: advantages_of(name, [[1.0, 0.0]])[0] for name in ADVANTAGES_MOVED}
    assert scopes == {"gpg": "batch", "scale_rl": "batch", "grpo_passk": "group", "dr_grpo_passk": "group"}


@pytest.mark.parametrize("name", ADVANTAGES_MOVED)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name, reward):
    for size in (1, 2, 3, 8):
        assert advantages_of(name, [[reward] * size])[1] == [0.0] * size


def test_against_formulas_in_torch():
    rewards = torch.tensor([reward for group in GROUPS for reward in group], dtype=torch.float64)
    means = torch.cat([torch.tensor(group).double().mean().expand(len(group)) for group in GROUPS])
    centred = rewards - means
    teaching = sum(len(group) for group in GROUPS if len(set(group)) > 1)
    close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(advantages_of("gpg", GROUPS)[1], len(rewards) / teaching * centred, **close)
    expected = centred / (centred.std() + EPSILON)
    np.testing.assert_allclose(advantages_of("scale_rl", GROUPS)[1], expected, **close)
    for group in GROUPS[:4]:
        r = torch.tensor(group)
        rivals = [torch.cat([r[:i], r[i + 1 :]]) for i in range(len(r))]
        lead = torch.stack([r.max() - rival.max() for rival in rivals])
        np.testing.assert_allclose(advantages_of("dr_grpo_passk", [group])[1], lead, **close)
        expected = lead / (r.std() + EPSILON)
        np.testing.assert_allclose(advantages_of("grpo_passk", [group])[1], expected, **close)


def config_with(algorithm: dict[str, Any]) -> Any:
    sections = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    return parse_config(sections | {"trainer": {"algorithm": algorithm}}, "run.yaml")


@pytest.mark.parametrize("name", ADVANTAGES_MOVED)
def test_a_name_that_was_built_in_says_which_file_and_setting_have_it(name, tmp_path):
    with pytest.raises(ConfigError) as refused:
        config_with({"advantage": name})
    function = ADVANTAGES_MOVED[name]
    file = function.partition(":")[0]
    assert f"examples/algorithms/{file}" in str(refused.value)
    assert f"trainer.algorithm.advantage: {function}" in str(refused.value)
    shutil.copy(EXAMPLES / file, tmp_path)  # what the error says
    assert Advantages(config_with({"advantage": f"{tmp_path}/{function}"}))


def test_the_preset_that_went_says_which_settings_it_had():
    with pytest.raises(ConfigError) as refused:
        config_with({"preset": "scalerl"})
    assert f"examples/algorithms/{PRESETS_MOVED['scalerl']}" in str(refused.value)
    assert "trainer.algorithm.advantage: scale_rl.py:scale_rl" in str(refused.value)
    assert config_with(scale_rl_settings()).trainer.algorithm.loss == "cispo"


def record(folder: Path, algorithm: dict[str, Any], names: dict[str, str]) -> Path:
    """The config file of a run with these settings, which a release wrote that had `names` built in."""
    tree = config_with(algorithm).model_dump(mode="json")
    tree["trainer"]["algorithm"] |= names
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("name", ADVANTAGES_MOVED)
def test_a_run_that_was_recorded_with_such_a_name_is_read_with_the_example(name, tmp_path):
    config = load_recorded(record(tmp_path, {}, {"advantage": name}))
    assert config == config_with({"advantage": example(ADVANTAGES_MOVED[name])})
    assert Advantages(config)


def test_a_run_that_was_recorded_with_the_preset_has_its_settings(tmp_path):
    names = {"preset": "scalerl", "advantage": "scale_rl"}
    assert load_recorded(record(tmp_path, scale_rl_settings(), names)) == config_with(scale_rl_settings())


def test_such_a_run_is_read_where_no_examples_are_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(moved, "CLONE", tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load_recorded(record(tmp_path, {}, {"advantage": "gpg"}))
    assert config.trainer.algorithm.advantage == "examples/algorithms/gpg.py:gpg"
    with pytest.raises(ConfigError, match=r"examples/algorithms/gpg\.py does not exist"):
        Advantages(config)
