"""One YAML file per run: every mistake is answered with field, value and remedy. What a resume may change."""

import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.support.trajectories import make_config
from tidemill.common.config import (
    OptimizerConfig,
    RunConfig,
    load_config,
    parse_config,
    parse_recorded,
    rules,
)
from tidemill.common.config.changes import FIXED, changed_fields
from tidemill.common.config.run import SPANNING_RULES
from tidemill.common.config.section import Section
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import ROOT
from tidemill.services.console.check.explain import read_sections
from tidemill.services.console.check.preflight import cost_of_choices, idle_settings
from tidemill.services.console.commands import UpOptions
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.up.start import _check_changes

SECTIONS = sorted((ROOT / "examples" / "rewards").glob("*.yaml"))
"""Examples of the `reward` section alone."""


EXAMPLES = sorted(set((ROOT / "examples").glob("**/*.yaml")) - set(SECTIONS))
DRAWN = ROOT / "examples" / "shapes"
"""Examples whose data a script draws; tests of whole examples (`test_examples.py`) run them."""
MINIMAL: dict[str, Any] = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def write(folder: Path, tree: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return path


def refused(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | tree, "run.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_is_a_valid_config_whose_files_exist(path):
    config = load_config(path)
    train = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    files = (source if isinstance(source, str) else source.path for source in train)
    if path.parent == DRAWN:
        return
    for file in (*files, *config.data.eval.values()):
        assert Path(file).is_absolute(), file
        assert Path(file).exists(), file


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.name)
def test_every_example_of_a_section_is_valid(path):
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config(path, ["model.path=model", "data.train=train.jsonl"])
    assert config.reward.named.keys() == tree["reward"]["rewards"].keys()


def test_two_lines_are_a_config_that_reads_back_the_same():
    config = parse_config(MINIMAL, "run.yaml")
    assert config.trainer.max_staleness == 1
    assert config.reward.on_failure == "drop_sample"
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("reward", "fields"),
    [
        ({}, []),
        ({"on_failure": "drop_group"}, []),
        ({"on_failure": 0}, ["reward.on_failure is 0"]),
        ({"rewards": {"a": {"function": "math"}, "b": {"function": "gsm8k", "on_failure": -1.5}}},
         ["reward.rewards.b.on_failure is -1.5"]),
        ({"on_failure": 0.0, "rewards": {"a": {"function": "math", "weight": 0}, "b": {"function": "gsm8k"}}},
         ["reward.rewards.b.on_failure is 0"]),
        ({"rewards": {"a": {"function": "math"},
                      "b": {"function": "gsm8k", "on_failure": 0, "lanes": ["eval"]}}}, []),
    ],
    ids=["default", "drop_group", "all", "one of two", "only logged", "evaluation alone"],
)  # fmt: skip
def test_a_number_as_on_failure_is_warned_of_where_it_is_trained(reward, fields):
    warnings = parse_config({**MINIMAL, "reward": reward}, "run.yaml").warnings
    assert [warning.partition(":")[0] for warning in warnings] == fields


OUT_OF_BOUNDS: list[tuple[str, str, Any]] = [
    ("trainer", "group_size", 0), ("trainer", "max_staleness", -1), ("trainer", "batch_order", "random"),
    ("rollout", "workers", 100_000), ("rollout", "engine", "magic"), ("reward", "timeout_s", 0),
    ("reward", "timeout_s", math.nan), ("reward", "timeout_s", math.inf), ("streams", "lease_s", 0.01),
    ("streams", "max_message_mb", 10_000), ("data", "max_prompt_tokens", 0),
]  # fmt: skip


FILTERS_ALONE = {"group_size": 1, "algorithm": {"filter_zero_variance": True}}
CURRICULUM = MINIMAL["data"] | {"curriculum": {"easy": 0.5, "hard": 0.5}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        # A field that there is not, with the one that was meant.
        ({"steps": 8}, ["steps: no such field; did you mean trainer.steps?"]),
        ({"lr": 0.1}, ["did you mean trainer.algorithm.value.lr or trainer.optimizer.lr?"]),
        ({"trainner": {}}, ["trainner: no such field; did you mean 'trainer'?"]),
        ({"trainer": {"max_stalenes": 2}}, ["trainer.max_stalenes", "'max_staleness'"]),
        ({"trainer": {"optimizer": {"zzz": 1}}}, ["trainer.optimizer.zzz", "fields here: betas, eps, lr"]),
        # All problems at once.
        ({"trainer": {"group_size": 0, "stepz": 1}, "seed": -1}, ["trainer.group_size", "stepz", "seed"]),
        *(
            ({at: MINIMAL.get(at, {}) | {name: x}}, [f"{at}.{name}: must be", f"got {x!r}"])
            for at, name, x in OUT_OF_BOUNDS
        ),
        # Of the wrong type.
        ({"trainer": {"group_size": "many"}}, ["trainer.group_size"]),
        ({"trainer": []}, ["trainer"]),
        ({"seed": "7.5"}, ["seed"]),
        # An id that could leave its place.
        *(({"run_id": run_id}, ["run_id"]) for run_id in ("a b", "-x", "x/y", "a" * 101, "x\n")),
        # What contradicts another field.
        ({"model": {"path": "m/A.Q4_1.gguf"}}, ["model.path"]),
        ({"data": CURRICULUM}, ["hard (0.5)", "easy (0.5)"]),
        ({"rollout": {"sampling": {"max_tokens": 100_000}}}, ["max_tokens"]),
        ({"reward": {"min_group_size": 9}}, ["reward.min_group_size"]),
        ({"trainer": FILTERS_ALONE, "reward": {"min_group_size": 1}}, ["filter_zero_variance"]),
        ({"reward": {"on_failure": "value"}}, ["reward.on_failure"]),
    ],
)
def test_a_mistake_is_named_by_its_field(tree, said):
    message = refused(tree)
    assert [words for words in said if words not in message] == []


def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(tmp_path):
    for text, field in (
        ('data: {train: a.jsonl, system_prompt: "hm \\ud83d"}', "data.system_prompt"),
        (
            'data: {train: a.jsonl}\nreward: {function: math, kwargs: {tag: ["\\ude00"]}}',
            r"reward.kwargs.tag\[0\]",
        ),
    ):
        path = write(tmp_path, f"model: {{path: model}}\n{text}\n")
        with pytest.raises(ConfigError, match=rf"config.yaml: {field} holds half of a surrogate pair"):
            load_config(path)


def fields_of(section: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a config that stand at a fixed place."""
    for name, information in section.model_fields.items():
        yield f"{prefix}{name}"
        if hasattr(information.annotation, "model_fields"):
            yield from fields_of(information.annotation, f"{prefix}{name}.")


def minimal_with(path: str, value: Any) -> dict[str, Any]:
    """The smallest config with a value at a dotted name."""
    tree = deepcopy(MINIMAL)
    node = tree
    *sections, name = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    return tree


@pytest.mark.parametrize("path", list(fields_of(RunConfig)))
def test_a_value_of_a_wrong_type_is_answered_in_our_words(path: str) -> None:
    """A section or map that got a scalar or a list, a list that got a scalar, a scalar that got a list."""
    for value in ("x", 3, [1], {"x": {"y": {}}}):
        try:
            parse_config(minimal_with(path, value), "run.yaml")
        except ConfigError as error:
            text = str(error)
            foreign_words = "valid dictionary", "valid tuple", "valid list", "instance of", "nput should"
            for foreign in (*foreign_words, "match pattern"):
                assert foreign not in text, text
            fields = [line.partition(": ")[0] for line in text.splitlines()[1:]]
            # Of a map's entry, key and value may both be wrong.
            assert len(set(fields)) == len(fields) or isinstance(value, dict), text
            assert not any(field.endswith(".bool") for field in fields), text


@pytest.mark.parametrize(
    ("path", "value", "answer"),
    [
        ("data.eval", "e.jsonl", "data.eval: must be a map of names to values, got 'e.jsonl'; write eval: "
         "{NAME: e.jsonl}"),
        ("trainer.algorithm", "grpo", "write algorithm: {preset: grpo}"),
        ("model", "org/model", "write model: {path: org/model}"),
        ("reward", "gsm8k", "write reward: {function: gsm8k}"),
        ("reward.rewards", ["a"], "write rewards: {NAME: VALUE}"),
        ("trainer.lora", 16, "write lora: {rank: 16}"),
        ("trainer.gpus", "0,1", "must be a list, got '0,1'; write gpus: [0, 1]"),
        ("trainer.optimizer.betas", 0.9, "write betas: [0.9, 0.999]"),
        ("trainer.steps", "many", "trainer.steps: must be a whole number, got 'many'"),
        ("run_id", 7, "run_id: must be text, got 7; write it in quotes: run_id: \"7\""),
        ("trainer.batch_order", "in_ordr", "did you mean 'in_order'?"),
        # Of a field of several types, and of one whose text has a form.
        ("reward.on_failure", "zero", "1 problem\n  reward.on_failure: must be 'drop_sample' or "
         "'drop_group', or a number, got 'zero'"),
        ("reward.on_failure", "drop_sampel", "got 'drop_sampel'; did you mean 'drop_sample'?"),
        ("trainer.micro_batch_tokens", 5, "must be greater than or equal to 16, or 'auto', got 5"),
        ("weights.url", "s3", "weights.url: must be the address of a weight server (http:// or https://)"),
        ("streams.claim_check_url", "x", "must be the address of a store, such as s3://bucket/folder"),
        ("run_id", "a b", "run_id: must be letters, digits, '.', '_' and '-', at most 100, of which"),
        ("trainer.evaluation.keep_best", "x", "must be score, accuracy, pass_at_k or pass_at_N, perhaps of"),
        ("servers", {"a b": {"base_urls": ["http://h:1"], "model": "m", "api_key_env": "a-b"}},
         "servers.a b: must be a name of letters, digits, '_' and '-', at most 64, got 'a b'"),
        ("servers", {"a": {"base_urls": ["http://h:1"], "model": "m", "api_key_env": "a-b"}},
         "servers.a.api_key_env: must be the name of an environment variable, such as JUDGE_KEY"),
        ("reward.rewards", {"a b": {"function": "math"}}, "reward.rewards.a b: must be a name of letters"),
        # A name and its value are two things.
        ("trainer.algorithm.rejection.bounds", {"x": "y"}, "2 problems"),
        ("data.train", [{"name": "a/b", "path": "p"}], "name: must be letters, digits, '.', '_' and '-', at"),
        # Of a place in a list, which has no name.
        ("data.train", ["a.jsonl", 7], "data.train.1: must be text, got 7; write it in quotes: \"7\""),
        ("data.train", [{"name": "a", "path": "p"}, "b.jsonl"], "write {name: NAME, path: b.jsonl}"),
        ("reward.rewards", {"a": "gsm8k"}, "write a: {function: gsm8k}"),
    ],
)  # fmt: skip
def test_what_was_meant_is_written_out(path: str, value: Any, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(minimal_with(path, value), "run.yaml")
    assert answer in str(caught.value)


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match="data: required, but not given"):
        parse_config({"model": {"path": "m"}}, "run.yaml")


SOURCES = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": ["b.jsonl"], "group_size": 4}]


def with_sources(*changes: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A tree with two sources, the first ones changed."""
    changed = [source | change for source, change in zip(SOURCES, [*changes, {}, {}], strict=False)]
    return {"data": {"train": changed}} | sections


def test_sources_are_read_with_what_is_their_own(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MINIMAL | with_sources({"sampling": {"top_p": 0.9}})))
    config = load_config(tmp_path / "run.yaml")
    first, second = config.data.sources
    assert first.path == str(tmp_path / "a.jsonl")
    assert [config.sampling_of(source).top_p for source in (first, second)] == [0.9, 1.0]
    assert [config.group_size(name) for name in ("a", "b", "")] == [8, 4, 8]
    assert config.largest_group_size == 8
    assert parse_config(config.model_dump(mode="json"), "the same once more") == config


@pytest.mark.parametrize(
    ("changes", "sections", "said"),
    [
        ([{"weight": 0}], {}, "data.train.0.weight: must be greater than 0, got 0"),
        ([{"name": "b"}], {}, "two sources are called 'b'"),
        ([{"sampling": {"temperature": 0.5}}], {}, "sampling.temperature"),
        (
            [{"sampling": {"top_p": 1.5}}],
            {},
            "sampling of source 'a': top_p: must be less than or equal to 1, got 1.5",
        ),
        ([{"sampling": {"max_tokens": 513}}], {}, "exceeds rollout.sampling.max_tokens (512)"),
        ([{"group_size": 1}], {"reward": {"min_group_size": 1}}, "group_size of source 'a' is 1"),
        ([{"group_size": 1}], {}, "reward.min_group_size (2) exceeds group_size of source 'a' (1)"),
        ([], {"reward": {"rewards": {"x": {"function": "math", "sources": ["c"]}}}}, "names c"),
        ([], {"reward": {"rewards": {"x": {"function": "math", "sources": ["a"]}}}}, "scores source 'b'"),
        ([{"unknown": 1}], {}, "data.train.0.unknown: no such field"),
        ([{"environment": "shop"}], {}, "source 'a' names an environment, and rollout.environment.use is"),
    ],
)
def test_sources_that_do_not_fit_are_refused(changes, sections, said):
    assert said in refused(with_sources(*changes, **sections))


def test_sources_of_a_reward_need_sources_and_cover_evaluation_sets_too():
    reward = {"reward": {"rewards": {"x": {"function": "math", "sources": ["a", "b"]}}}}
    assert "data.train lists none" in refused(reward)
    tree = with_sources(**reward)
    tree["data"]["eval"] = {"held": "held.jsonl"}
    assert "no reward scores evaluation set 'held'" in refused(tree)
    tree["reward"]["rewards"]["x"]["sources"].append("held")
    config = parse_config(MINIMAL | tree, "run.yaml")
    named = config.reward.rewards["x"]
    assert [named.scores_source("any", name) for name in ("a", "held", "", "c")] == [True, True, False, False]


EVALUATED = {"data": {"train": "train.jsonl", "eval": {"held": "held.jsonl"}}}


@pytest.mark.parametrize(
    ("sections", "idle"),
    [
        ({}, []),
        ({"streams": {"claim_check_url": "s3://bucket/x"}}, ["streams.claim_check_url"]),
        ({"streams": {"claim_check_url": "s3://bucket/x", "claim_check_bytes": 9}}, []),
        ({"streams": {"claim_check_url": "s3://bucket/x"}, "images": {}}, []),
        ({"streams": {"claim_check_url": "s3://bucket/x"}, "rollout": {"sampling": {"top_k": 5}}}, []),
        ({"trainer": {"evaluation": {"top_p": 0.9, "min_p": 0.1, "samples": 2}}} | EVALUATED,
         ["trainer.evaluation.top_p", "trainer.evaluation.min_p", "trainer.evaluation.samples"]),
        ({"trainer": {"evaluation": {"top_p": 0.9, "temperature": 1.0}}} | EVALUATED, []),
        ({"trainer": {"evaluation": {"every": 5}}}, ["trainer.evaluation"]),
        ({"trainer": {"algorithm": {"kl": {"coefficient": 0.1, "estimator": "k2"}}}},
         ["trainer.algorithm.kl.coefficient", "trainer.algorithm.kl.estimator"]),
        ({"trainer": {"algorithm": {
            "kl": {"coefficient": 0.1}, "reference": {"model": "frozen", "every": 5}}}},
         ["trainer.algorithm.kl.coefficient", "trainer.algorithm.reference.every"]),
        ({"trainer": {"algorithm": {
            "kl": {"place": "loss", "coefficient": 0.1},
            "reference": {"model": "updated", "every": 5}}}}, []),
        ({"trainer": {"algorithm": {"kl_control": {"horizon": 9}, "entropy_control": {"delta": 0.1}}}},
         ["trainer.algorithm.kl_control.horizon", "trainer.algorithm.entropy_control.delta"]),
        ({"trainer": {"algorithm": {"importance": {"mode": "off", "high": 5}, "value": {"lr": 1e-5}}}},
         ["trainer.algorithm.importance.high", "trainer.algorithm.value.lr"]),
        ({"trainer": {"algorithm": {
            "importance": {"high": 5}, "advantage": "gae", "value": {"lr": 1e-5}}}}, []),
        ({"trainer": {"algorithm": {
            "overlong": {"buffer_share": 0.5}, "length_penalty": {"of": "successes"}}}},
         ["trainer.algorithm.overlong.buffer_share", "trainer.algorithm.length_penalty.of"]),
        ({"trainer": {"algorithm": {"teacher": {"clip": 5}}}}, ["trainer.algorithm.teacher"]),
        ({"streams": {"archive": {"enabled": False, "keep_gb": 5}}}, ["streams.archive.keep_gb"]),
        ({"reward": {"cache_mb": 9}}, ["reward.cache_mb"]),
        ({"reward": {"cache_mb": 9, "rewards": {"x": {"function": "math", "cache": True}}}}, []),
        ({"trainer": {"policy": "simulated", "algorithm": {"router": {"balance": 0.1}}}},
         ["trainer.algorithm.router"]),
        ({"rollout": {"environment": {"agent": "a.py:run"}}}, ["rollout.environment.agent"]),
        ({"trainer": {"algorithm": {"max_filter_rounds": 2, "dppo": {"max_ratio": 9}}}},
         ["trainer.algorithm.max_filter_rounds", "trainer.algorithm.dppo"]),
        ({"trainer": {"algorithm": {"loss": "clip_cov", "covariance": {"share": 0.1}}}}, []),
        ({"servers": {"s": {"base_urls": ["http://h:1"], "model": "m"}},
         "reward": {"rewards": {"x": {"model": {"servers": "s", "std": 2.0}}}}},
         ["reward.rewards.x.model.std"]),
    ],
)  # fmt: skip
def test_settings_that_do_nothing_are_named(sections, idle):
    texts = idle_settings(parse_config(MINIMAL | sections, "run.yaml"))
    assert [text.partition(" ")[0] for text in texts] == idle


def test_a_learning_rate_that_destroys_the_model_is_a_warning():
    def warnings(**trainer: Any) -> list[str]:
        return parse_config(MINIMAL | {"trainer": trainer}, "run.yaml").warnings

    (warning,) = warnings(optimizer={"lr": 1})
    assert warning.startswith("trainer.optimizer.lr is 1:")
    assert not warnings(optimizer={"lr": 0.01}) and not warnings(algorithm={"value": {"lr": 0.5}})
    assert not warnings(optimizer={"lr": 1e-3}) and not warnings(optimizer={"lr": 1}, policy="simulated")
    (of_critic,) = warnings(algorithm={"advantage": "gae", "value": {"lr": 0.5}})
    assert of_critic.startswith("trainer.algorithm.value.lr is 0.5:")


def test_a_recorded_preset_that_is_an_example_now_is_read_with_the_settings_beside_it():
    tree = MINIMAL | {"trainer": {"algorithm": {"preset": "scalerl", "advantage": "grpo_batch"}}}
    assert parse_recorded(tree, "an old run").trainer.algorithm.advantage == "grpo_batch"
    with pytest.raises(ConfigError, match="is not built in any more"):
        parse_config(tree, "a new config")


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_filtered_sampling_is_refused_where_its_gap_would_count_as_movement(option):
    own_ratio = {"trainer": {"algorithm": {"old_logprobs": "rollout"}}}
    bare: dict[str, Any] = {"sampling_masks": False}
    assert "old_logprobs: rollout" in refused({"rollout": {"sampling": option, **bare}} | own_ratio)
    assert "old_logprobs: rollout" in refused(with_sources({"sampling": option}, rollout=bare, **own_ratio))
    unweighted = {"trainer": {"algorithm": {"importance": {"mode": "off"}}}}
    said = refused({"rollout": {"sampling": option, **bare}} | unweighted)
    assert "rollout.sampling_masks: true" in said and "importance.mode: truncate" in said
    penalty = {"kl": {"place": "reward"}, "reference": {"model": "frozen"}}
    masked = {"rollout": {"sampling": option}}
    assert "kl.place: reward" in refused(masked | {"trainer": {"algorithm": penalty}})
    for others in (own_ratio, unweighted):
        assert parse_config(MINIMAL | masked | others, "run.yaml").masked_sources == {""}


def test_masks_are_those_of_sources_that_filter_their_sampling():
    tree = with_sources({"sampling": {"top_k": 5}})
    names = [source["name"] for source in tree["data"]["train"]]
    config = parse_config(MINIMAL | tree, "run.yaml")
    assert config.masked_sources == {names[0]} and len(names) > 1
    assert parse_config(MINIMAL, "run.yaml").masked_sources == frozenset()
    (cost,) = cost_of_choices(config)
    assert "MiB a step" in cost and not [*cost_of_choices(parse_config(MINIMAL, "run.yaml"))]


def fields(model: type[BaseModel], where: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from fields(kind, f"{where}{name}.")
        else:
            yield f"{where}{name}", field


def test_every_file_of_rules_that_span_sections_has_a_row():
    files = {file.name for file in iter_modules(rules.__path__)}
    assert files == {row.file for row in SPANNING_RULES}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"reward": {"rewards": {"e": {"environment": True}}}}, "single_turn, which gives none"),
        ({"trainer": {"algorithm": {"overlong": {"penalty": 1.0}}},
          "rollout": {"environment": {"use": "g.py:G"}}}, "set rollout.environment.max_tokens"),
        ({"reward": {"rewards": {"a": {"function": "math", "router": "r"}}}}, "a.router names 'r'"),
        ({"servers": {"s": {"model": "m", "local": {"engine": "transformers"}}}}, "servers.s.local.engine"),
        (with_sources({"kind": "demonstrations"}, trainer={"batch_order": "as_ready"}), "take in_order"),
        ({"images": {}, "data": MINIMAL["data"] | {"chat_template": "never"}}, "data.chat_template is never"),
        ({"trainer": {"train_tower": True}}, "needs the section images"),
    ],
    ids=["its reward", "its sessions", "router", "servers", "demonstrations", "images", "tower"],
)  # fmt: skip
def test_rules_that_span_sections_are_read_for_each_thing_that_a_run_may_have(sections, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config(MINIMAL | sections, "run.yaml")


def test_every_number_has_bounds_and_every_field_is_documented():
    numbers = (int, float, int | None, float | None)
    assert [
        name for name, field in fields(RunConfig) if field.annotation in numbers and not field.metadata
    ] == []
    assert [field.name for section in read_sections() for field in section.fields if not field.text] == []


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("trainer.group_size=16", "trainer", "group_size", 16),
        ("trainer.deterministic=true", "trainer", "deterministic", True),
        ("reward.timeout_s=2.5", "reward", "timeout_s", 2.5),
        ("reward.timeout_s=1e2", "reward", "timeout_s", 100.0),
        ("data.train=[a.jsonl, b.jsonl]", "data", "train", ["a.jsonl", "b.jsonl"]),
        ("trainer.epochs=null", "trainer", "epochs", None),
        ("reward.function=a.py:f=1", "reward", "function", "a.py:f=1"),
        ("trainer.optimizer={lr: 1e-3}", "trainer", "optimizer", OptimizerConfig(lr=1e-3)),
        ("data.prompt_suffix='7'", "data", "prompt_suffix", "7"),
        ("data.prompt_suffix=nan", "data", "prompt_suffix", "nan"),
        ('data.prompt_suffix="1e5"', "data", "prompt_suffix", "1e5"),
        (" trainer.steps =3", "trainer", "steps", 3),
    ],
)
def test_an_override_has_the_type_its_text_means(tmp_path, override, section, field, value):
    got = getattr(getattr(load_config(write(tmp_path, MINIMAL), [override]), section), field)
    assert got == value
    assert type(got) is type(value)


def test_overrides_reach_into_sections_that_the_file_does_not_have_and_the_last_wins(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), ["trainer.optimizer.lr=1e-5", "seed=1", "seed=2"])
    assert (config.trainer.optimizer.lr, config.seed) == (1e-5, 2)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("reward.function=bad.py:", "reward.function", "bad.py:"),
        ("run_id=2026-01-31", "run_id", "2026-01-31"),
        ("run_id=007", "run_id", "007"),
        ("data.system_prompt=Answer: briefly", "data.system_prompt", "Answer: briefly"),
        # Where a field is no text, or not only text, YAML's reading holds.
        ("reward.kwargs=strict: true", "reward.kwargs", {"strict": True}),
        ("reward.group=null", "reward.group", None),
        ("trainer.optimizer.lr=1e-5", "trainer.optimizer.lr", 1e-5),
        ("reward.on_failure=0", "reward.on_failure", 0.0),
    ],
)
def test_an_override_of_a_text_is_taken_as_it_stands(tmp_path, override, field, value):
    node: Any = load_config(write(tmp_path, MINIMAL), [override])
    for name in field.split("."):
        node = getattr(node, name)
    assert (node.rpartition("/")[2] if isinstance(node, str) else node) == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        *(
            (form, "must have the form section.field=value")
            for form in ("seed", "=3", "seed.=3", ".seed=3", "")
        ),
        ("seed.deep=1", "seed is not a section but 3"),
        ("trainer.step=3", "did you mean 'steps'"),
        # A list or map in YAML's brackets is meant as such.
        ("run_id=[a]", "run_id: must be text, got ['a']"),
    ],
)
def test_an_override_that_cannot_be_is_refused(tmp_path, override, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(write(tmp_path, MINIMAL | {"seed": 3}), [override])


def test_relative_paths_are_relative_to_the_file(tmp_path):
    for name in ("train.jsonl", "more.jsonl", "eval.jsonl", "reward.py"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    tree = {
        "model": {"path": "model"},
        "data": {"train": ["train.jsonl", "./more.jsonl"], "eval": {"held_out": "eval.jsonl"}},
        "reward": {"function": "reward.py:score"},
        "rollout": {"environment": {"use": "not_there.py:Env"}},
    }
    config = load_config(write(tmp_path, tree))
    # Also what is missing: the working directory may have another file of that name.
    assert config.rollout.environment.use == f"{tmp_path / 'not_there.py'}:Env"
    assert config.model.path == str(tmp_path / "model")
    assert config.data.train == [str(tmp_path / "train.jsonl"), str(tmp_path / "more.jsonl")]
    assert config.data.eval == {"held_out": str(tmp_path / "eval.jsonl")}
    assert config.reward.function == f"{tmp_path / 'reward.py'}:score"


def test_names_that_are_not_files_stay_names(tmp_path):
    tree = {"model": {"path": "Qwen/Qwen2.5-0.5B"}, "data": {"train": "/data/t.jsonl"}}
    config = load_config(write(tmp_path, tree | {"reward": {"function": "package.module:name"}}))
    assert config.model.path == "Qwen/Qwen2.5-0.5B"
    assert config.data.train == "/data/t.jsonl"
    assert config.reward.function == "package.module:name"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"a: [", "not valid YAML"),
        (b"- 1", "mapping of sections, got list"),
        (b"", "got NoneType"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"data: \x00", "not valid YAML"),
        (b"model: !!python/object:os.system {}", "not valid YAML"),
        (b"data: {}\ndata: {}", "(?s:not valid YAML.*line 1.*'data' again.*line 2)"),
        (b"data: 2026-02-30", "not valid YAML: day is out of range"),
        (b"data: " + b"9" * 5000, "not valid YAML: .* 5000 digits"),
        (b"data: " + b"[" * 1000, "not valid YAML: maximum recursion"),
    ],
)
def test_a_file_that_is_no_mapping_in_plain_yaml_is_refused(tmp_path, content, said):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.yaml.*{said}"):
        load_config(path)


JUDGE: dict[str, Any] = {"judge": {"servers": "s", "template": "{{ completion }}"}}
MODEL: dict[str, Any] = {"model": {"servers": "s"}}
TEACHER: dict[str, Any] = {"teacher": {"servers": "s"}}
LOCAL: dict[str, Any] = {"model": "m", "local": {}}


@pytest.mark.parametrize(
    ("rewards", "servers", "field"),
    [
        ({"j": JUDGE}, {}, "reward.rewards.j.judge.servers"),
        ({"f": {"function": "gsm8k", "router": "x"}}, {"s": {}}, "reward.rewards.f.router"),
        ({"j": JUDGE}, {"s": {"base_urls": ["http://h:1"]}}, "servers.s"),  # a judge asks for a model by name
        ({}, {"s": {"local": {}}}, "servers.s"),  # local servers serve one
        ({}, {"a b": {}}, "servers.a b"),
        ({"j": JUDGE, "m": MODEL}, {"s": LOCAL}, "servers.s.local"),
        ({"one": MODEL, "all": {"model": {"servers": "s", "head": "token"}}}, {"s": LOCAL},
         "servers.s.local"),
        ({"j": JUDGE}, {"s": {"model": "m", "local": {"engine": "transformers"}}}, "servers.s.local.engine"),
        ({"t": {**TEACHER}}, {"s": {"model": "m", "local": {"shares_rollout_gpus": True}}},
         "servers.s.local"),
        ({}, {"s": {"base_urls": ["ftp://h"]}}, "servers.s.base_urls"),
        ({}, {"s": {"base_urls": ["http://user:secret@h"]}}, "servers.s.base_urls"),
        ({}, {"s": {"base_urls": ["http://h", "http://h"]}}, "servers.s.base_urls"),
        ({"m": {"model": {**MODEL["model"], "token_reward": "mean", "head": "token"}}}, {"s": {}}, "m.model"),
        ({"m": {"model": {**MODEL["model"], "clip": [1.0, 0.0]}}}, {"s": {}}, "m.model.clip"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_field(rewards, servers, field):
    with pytest.raises(ConfigError) as caught:
        make_config(reward={"rewards": rewards} if rewards else {}, servers=servers)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("rewards", "servers"),
    [
        ({"j": JUDGE, "f": {"function": "gsm8k", "router": "s"}}, {"s": LOCAL}),
        ({"a": JUDGE, "b": JUDGE}, {"s": LOCAL}),
        ({"j": JUDGE, "m": MODEL}, {"s": {"model": "m", "base_urls": ["http://h:1"]}}),
        ({"j": JUDGE, "m": MODEL}, {"s": {"model": "m", "local": {"command": ["serve"]}}}),
        ({"m": MODEL}, {"s": {}}),  # replicas may register themselves
    ],
)
def test_rewards_and_functions_share_servers(rewards, servers):
    config = make_config(reward={"rewards": rewards}, servers=servers)
    assert {reward.servers or reward.router for reward in config.reward.named.values()} == {"s"}


@pytest.mark.parametrize("kind", ["judge", "model", "teacher"])
def test_a_field_of_servers_in_a_reward_is_refused_with_its_place(kind):
    with pytest.raises(ConfigError, match=rf"reward.rewards.r.{kind}.base_urls.* servers.<name>.base_urls"):
        make_config(reward={"rewards": {"r": {kind: {"base_urls": ["http://h:1/v1"]}}}})


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    changed = changed_fields(make_config(**before), make_config(**after))
    return {change.field: (change.before, change.after, bool(change.refusal)) for change in changed}


def test_changes_are_named_by_field_with_both_values():
    before = {"trainer": {"steps": 4, "optimizer": {"lr": 0.1}}}
    after = {"trainer": {"steps": 9, "optimizer": {"lr": 0.2}}, "rollout": {"workers": 3}}
    assert changes(before, after) == {
        "trainer.steps": (4, 9, False),
        "trainer.optimizer.lr": (0.1, 0.2, False),
        "rollout.workers": (1, 3, False),
    }


@pytest.mark.parametrize(
    ("after", "field"),
    [
        ({"trainer": {"group_size": 4}}, "trainer.group_size"),
        ({"trainer": {"groups_per_step": 4}}, "trainer.groups_per_step"),
        ({"model": {"path": "other"}}, "model.path"),
        ({"model": {"path": "model", "dtype": "bfloat16"}}, "model.dtype"),
        ({"data": {"train": "other.jsonl"}}, "data.train"),
        ({"seed": 3}, "seed"),
        ({"data": {"train": [{"name": "a", "path": "train.jsonl"}]}}, "data.train"),
        ({"data": {"train": "train.jsonl", "curriculum": {}}}, "data.curriculum"),
        ({"data": {"train": "train.jsonl", "stream": True}}, "data.stream"),
    ],
)
def test_what_would_contradict_the_history_is_refused(after, field):
    (name, (_, _, is_refused)) = next(iter(changes({}, after).items()))
    assert (name, is_refused) == (field, True)


def test_the_id_of_the_run_is_no_change():
    assert changes({"run_id": "a"}, {"run_id": "b"}) == {}


def test_every_fixed_field_exists():
    for name in FIXED:
        section: Any = RunConfig
        for field in name.split("."):
            section = section.model_fields[field].annotation if hasattr(section, "model_fields") else None
        assert section is not None


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"steps": 9}, None),
        ({"steps": 4, "group_size": 2}, r"trainer\.group_size: 8 -> 2 \(groups that were issued"),
        ({"steps": 2}, r"3 committed steps, more than trainer\.steps = 2"),
    ],
    ids=["more steps are told", "another group size is refused", "steps are not taken back"],
)
def test_what_a_resume_may_change(tmp_path, trainer, said):
    folder = RunFolder(tmp_path, "one")
    folder.create(make_config(run_id="one", trainer={"steps": 4}))
    records = "".join(f'{{"kind": "step", "step": {i}}}\n' for i in range(3))
    (folder.path / "metrics.jsonl").write_text(records)
    options = UpOptions(config=tmp_path / "config.yaml", run_id="one", resume=True)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        settings = _check_changes(options, make_config(run_id="one", trainer=trainer), folder)
        assert [str(setting) for setting in settings] == ["trainer.steps: 4 -> 9"]
