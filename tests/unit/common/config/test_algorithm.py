"""`trainer.algorithm`: presets fill in, and each combination that would not do what it says is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tidemill.common.config import AlgorithmConfig, RunConfig, load_config, parse_config
from tidemill.common.config.algorithm import CoreAlgorithmConfig, is_users_own
from tidemill.common.config.algorithms.table import ADVANTAGES, LOSSES, PRESETS, SETTINGS
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages.registry import find_advantage
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss

MINIMAL: dict[str, Any] = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def config_of(algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    trainer = {"algorithm": algorithm, **sections.pop("trainer", {})}
    return parse_config(MINIMAL | {"trainer": trainer} | sections, "run.yaml")


def loaded(folder: Path, algorithm: str, overrides: Sequence[str] = ()) -> AlgorithmConfig:
    """Of a file with this text in the section."""
    path = folder / "run.yaml"
    path.write_text(f"model: {{path: m}}\ndata: {{train: t.jsonl}}\ntrainer: {{algorithm: {algorithm}}}\n")
    return load_config(path, overrides).trainer.algorithm


FROZEN = {"reference": {"model": "frozen"}}
ROLLOUT = {"old_logprobs": "rollout"}
TWO_REWARDS = {"rewards": {"right": {"function": "gsm8k"}, "short": {"function": "exact_match"}}}
FILTERED = {"rollout": {"sampling": {"top_p": 0.9}, "sampling_masks": False}}
SESSIONS = {
    "rollout": {"environment": {"use": "my_env.py:MyEnv"}},
    "reward": {"rewards": {"game": {"environment": True}}},
}
TEACHER = {"teacher": {"servers": "there"}}


def taught(*sections: dict[str, Any], **rewards: Any) -> dict[str, Any]:
    """Sections of a run with a teacher, or with other rewards that use its servers."""
    reward = {"rewards": rewards or {"wise": TEACHER}}
    tree: dict[str, Any] = {"servers": {"there": {}}, "reward": reward}
    for section in sections:
        tree |= {name: tree.get(name, {}) | fields for name, fields in section.items()}
    return tree


@pytest.mark.parametrize(
    ("algorithm", "sections", "reason"),
    [
        ({"advantage": "gae", "value": {"model": "own"}}, {"trainer": {"lora": {}}}, "a whole second model"),
        ({"kl": {"place": "loss"}}, {}, "needs a reference model"),
        ({"kl": {"place": "reward"}, **FROZEN}, FILTERED, "put the penalty into the loss"),
        ({**ROLLOUT}, FILTERED, "trainer.algorithm.old_logprobs: rollout would clip"),
        ({"rejection": {"bounds": {"seq_mean_k1": [0.99, 1.01]}}}, FILTERED,
         "bounds.seq_mean_k1 would reject"),
        ({"importance": {"level": "sequence"}}, FILTERED, "importance.level: sequence would multiply"),
        ({"importance": {"mode": "mask", "level": "geometric", "low": 0.99, "high": 1.01}}, FILTERED,
         "importance.level: geometric would multiply"),
        ({"loss": "gspo"}, {}, "importance.level: token would weigh or mask single tokens"),
        ({"loss": "sapo"}, {}, "always 1 with one update a step"),
        ({"kl": {"place": "reward", "estimator": "k3+"}, **FROZEN}, {}, "is k3 with another gradient"),
        ({"rejection": {"bounds": {"seq_mean_k1": [1.1, 2.0]}}}, {}, "bounds: seq_mean_k1"),
        ({"rejection": {"bounds": {"token_k2": 0.0}}}, {}, "bounds: token_k2"),
        ({"loss": "gspo", "rejection": {"bounds": {"token_k1": 2.0}}, **ROLLOUT}, {}, "single tokens of it"),
        ({"correction": "geo"}, {}, "algorithm.correction: must be 'decoupled_token_is'"),
        ({"correction": "bypass_ppo_clip", "loss": "reinforce"}, {}, "would leave staleness uncorrected"),
        ({"rollout_penalty": 0.1}, FILTERED, "rollout_penalty would pull"),
        ({"off_policy_threshold": 0.5}, FILTERED, "off_policy_threshold would count it as a distance"),
        ({"importance": {"mode": "mask", "normalise": True}}, {}, "importance.mode is mask"),
        ({"importance": {"normalise": True}, **ROLLOUT}, {}, "importance.mode is off"),
        ({"loss": "reinforce", "importance": {"normalise": True}}, {"trainer": {"mini_batches": 2}},
         "which moves with each of 2 updates"),
        ({"loss": "gspo", "top_entropy_quantile": 0.2, **ROLLOUT}, {}, "gradient reaches all its tokens"),
        ({"top_entropy_quantile": 0.0}, {}, "top_entropy_quantile"),
        ({"loss": "vespo"}, {}, "set `old_logprobs: rollout`"),
        ({"loss": "clip_cov", "covariance": {"low": 5.0}}, {}, "must be below high"),
        ({"dual_clip": 3.0}, {}, "always 1 with one update a step"),
        ({"dual_clip": 1.0, **ROLLOUT}, {}, "dual_clip: must be greater than 1"),
        ({"dual_clip": 1.2, **ROLLOUT}, {}, "must exceed 1 + clip_high (1.28)"),
        ({"dual_clip": 3.0, "loss": "cispo", **ROLLOUT}, {}, "cispo has no use for it"),
        ({"loss": "reinforce"}, {"trainer": {"passes": 2}}, "how far later passes have moved"),
        ({"importance": {"mode": "mask"}, **ROLLOUT}, {}, "would weigh every token twice"),
        ({"loss": "gspo", "advantage": "gae", **ROLLOUT}, {}, "needs one advantage for it"),
        ({"loss": "gspo", "advantage": "reinforce_plus_plus", "kl": {"place": "reward"}, **FROZEN,
         **ROLLOUT}, {}, "gives one for each token"),
        ({"gamma": 0.9}, {}, "knows one reward for a sequence"),
        ({"advantage": "reinforce_plus_plus", "loss": "gspo", **ROLLOUT}, SESSIONS, "one advantage"),
        ({"overlong": {"penalty": 1.0}}, SESSIONS, "rollout.environment.max_tokens"),
        ({}, taught({"rollout": {"sampling": {"temperature": 0.7}}}), "temperature is 0.7"),
        ({}, taught({"rollout": {"sampling": {"top_p": 0.9}}}), "take place: loss"),
        ({"preset": "gspo"}, taught(), "one advantage for a sequence"),
        ({"teacher": {"place": "loss", "gamma": 0.5}}, taught(), "leave gamma out"),
        ({}, taught({"reward": {"on_failure": 0.0}}), "cannot stand for a teacher"),
        ({}, taught(wise=TEACHER | {"weight": -1.0}), "at least 0"),
        ({}, taught(wise=TEACHER, other=TEACHER), "both teachers of all data sources"),
        ({}, taught(**{n: TEACHER | {"applies_to": ["a", n]} for n in "xy"}), "both teachers of a,"),
        ({}, taught(wise={"teacher": {"servers": "there", "prompt_column": "a", "template": "b"}}),
         "not both"),
        ({"overlong": {"penalty": 1.0}, "mask_truncated": True}, {}, "choose one"),
        ({"advantage": "pass_at_k", "pass_k": 9}, {}, "holds no set of that many"),
        ({"advantage": "gdpo"}, {}, "reward.rewards has 0 for training"),
        ({"advantage": "gdpo"}, {"reward": {**TWO_REWARDS, "group": "rank"}}, "would not see it"),
        ({"advantage": "gdpo", "overlong": {"penalty": 1.0}}, {"reward": TWO_REWARDS}, "by itself"),
        ({"advantage": "gdpo", "kl": {"place": "reward"}, **FROZEN}, {"reward": TWO_REWARDS}, "by itself"),
        ({"advantage": "gdpo", "filter_zero_variance": True}, {"reward": TWO_REWARDS}, "sums are equal"),
        ({"length_penalty": {"tokens": 0.1}, "mask_truncated": True}, {}, "longest of their group"),
        ({"length_penalty": {"turns": 0.1}, "advantage": "pass_at_k"}, {}, "reach success_threshold"),
        ({"length_penalty": {"turns": 0.1}, "advantage": "remax"}, {}, "with a greedy one alone"),
        ({"advantage": "gdpo", "length_penalty": {"tokens": 1.0}}, {"reward": TWO_REWARDS}, "by itself"),
        ({"entropy_control": {"target": 0.1, "low": 0.1}}, {}, "lies outside of its low and high"),
        ({"entropy_control": {"low": 0.2, "high": 0.1}}, {}, "low (0.2) is above high (0.1)"),
        ({"advantage": "grp"}, {}, "did you mean 'grpo'"),
        ({"loss": "zzz"}, {}, "take one of cispo, clip_cov"),
        ({"preset": "grpoo"}, {}, "algorithm.preset: must be 'grpo'"),
        ({"preset": ["grpo"]}, {}, "algorithm.preset"),
        ({"importance": {"low": 1.5}}, {}, "importance.low"),
        *(
            (
                {"advantage": name},
                {"trainer": {"group_size": 1}, "reward": {"min_group_size": 1}},
                "be 0. Take",
            )
            for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "max_rl", "remax")
        ),
    ],
)  # fmt: skip
def test_a_bad_combination_is_refused_with_the_reason(algorithm, sections, reason):
    with pytest.raises(ConfigError) as caught:
        config_of(algorithm, **sections)
    assert reason in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("algorithm", "trainer"),
    [
        ({"advantage": "reinforce_plus_plus"}, {"group_size": 1}),
        ({"advantage": "gae"}, {"group_size": 1}),
        ({"loss": "gspo", "importance": {"level": "geometric", "mode": "mask"}}, {"mini_batches": 2}),
        ({"loss": "gspo", "importance": {"mode": "off"}}, {"mini_batches": 4}),
        ({"dual_clip": 3.0}, {"mini_batches": 2}),
        ({"dual_clip": 3.0}, {"passes": 2}),
        ({"loss": "sapo"}, {"passes": 2}),
        ({"kl": {"place": "loss"}, "reference": {"model": "updated", "every": 1}}, {}),
        ({"advantage": "mine.py:f", "loss": "package.module:g"}, {}),
        ({"advantage": "gdpo"}, {}),
    ],
)
def test_what_fits_is_accepted(algorithm, trainer):
    config_of(algorithm, trainer=trainer, reward={"min_group_size": 1, **TWO_REWARDS})


class TestPresets:
    def test_each_name_has_values_and_is_a_run_as_it_is(self):
        for name in PRESETS:
            config = config_of({"preset": name}).trainer.algorithm
            assert config.preset == name
            for field, value in PRESETS[name].items():
                actual = getattr(config, field)
                if isinstance(value, dict):
                    actual = {key: getattr(actual, key) for key in value}
                assert actual == value, (name, field)

    def test_what_is_given_wins_also_within_a_section(self):
        config = config_of(
            {"preset": "dapo", "clip_high": 0.3, "overlong": {"penalty": 0.5}}
        ).trainer.algorithm
        assert (config.clip_high, config.overlong.penalty, config.overlong.buffer_share) == (0.3, 0.5, 0.2)
        assert config.filter_zero_variance

    def test_the_resolved_config_reads_back_the_same(self):
        config = config_of({"preset": "ppo", "gae_lambda": 0.9})
        assert RunConfig.model_validate_json(config.model_dump_json()) == config

    def test_on_the_command_line_too(self, tmp_path):
        overrides = ["trainer.algorithm.preset=gspo", "trainer.algorithm.clip_low=0.1"]
        algorithm = loaded(tmp_path, "{}", overrides)
        assert (algorithm.loss, algorithm.clip_low) == ("gspo", 0.1)


def test_off_means_off_though_yaml_reads_it_as_false(tmp_path):
    algorithm = loaded(tmp_path, "{importance: {mode: off}, kl: {place: off}, reference: {model: off}}")
    assert (algorithm.importance.mode, algorithm.kl.place, algorithm.reference.model) == ("off",) * 3


def test_every_name_of_the_config_has_a_function_behind_it():
    for name in ADVANTAGES:
        assert find_advantage(AlgorithmConfig(advantage=name))
    for name in LOSSES:
        level = {"level": "sequence"} if LOSSES[name].level == "sequence" else {}
        old = "rollout" if LOSSES[name].weighs_by_rollout else "recompute"
        loss = find_loss(AlgorithmConfig(loss=name, importance=level, old_logprobs=old))
        assert loss.__name__ == ("ppo" if name == "clip_cov" else name)


def test_the_docs_tell_of_every_name_in_the_table():
    text = (Path(__file__).parents[4] / "docs" / "algorithms.md").read_text()
    named = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert {*ADVANTAGES, *LOSSES, *PRESETS} <= named
    table = text[text.index("| waits for |") :].split("\n\n")[0]
    rows = {line.split("`")[1]: line.split(" | ") for line in table.splitlines() if line.startswith("| `")}
    waits = {"group": "its group", "batch": "the mini-batch"}
    for name, traits in ADVANTAGES.items():
        _, _, needs, waits_for = rows[name]
        assert waits_for.startswith(waits[traits.scope]), name
        assert (needs == "group") == traits.compares_siblings, name


def test_paths_of_a_users_own_are_relative_to_the_config(tmp_path):
    (tmp_path / "mine.py").touch()
    algorithm = loaded(tmp_path, "{advantage: 'mine.py:f', loss: ppo}")
    assert (algorithm.advantage, algorithm.loss) == (f"{tmp_path / 'mine.py'}:f", "ppo")
    assert is_users_own(algorithm.advantage) and not is_users_own(algorithm.loss)


@pytest.mark.parametrize(
    ("algorithm", "mini_batches", "needs"),
    [({}, 1, False), ({}, 2, True), (ROLLOUT, 2, False), ({"loss": "reinforce"}, 2, False)],
)
def test_proximal_logprobs_are_wanted_only_where_they_differ_and_are_used(algorithm, mini_batches, needs):
    assert config_of(algorithm, trainer={"mini_batches": mini_batches}).trainer.needs_proximal is needs


def test_no_algorithm_has_a_setting_with_a_name_that_another_has():
    """Broken, one of the two would take its default and bounds from the other."""
    names = [name for section in (CoreAlgorithmConfig, *SETTINGS) for name in section.model_fields]
    assert sorted(names) == sorted(AlgorithmConfig.model_fields)
