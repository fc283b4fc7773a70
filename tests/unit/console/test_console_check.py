"""What `tidemill check` finds, without starting anything."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.checked_runs import make_folder, write_run
from tests.support.trajectories import make_config
from tidemill.common.config import DataConfig, ModelConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.dataset import Row
from tidemill.services.console.check import preflight
from tidemill.services.console.check.explain import describe, explain, preset_lines
from tidemill.services.console.check.model_folder import ModelFacts, check_lengths, inspect_model
from tidemill.services.console.check.preflight import Findings, examine


def rows(*prompts: Any) -> list[Row]:
    return [Row(prompt, "", None, {}, i, f"train.jsonl line {i + 1}") for i, prompt in enumerate(prompts)]


def data(limit: int, **fields: Any) -> DataConfig:
    return DataConfig(train="train.jsonl", max_prompt_tokens=limit, **fields)


def lengths_problem(folder: Path, found: list[Row], section: DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_lengths({"train": found}, ModelFacts(folder), section, [])
    return str(caught.value)


def test_a_complete_model_folder_is_described(tmp_path: Path) -> None:
    model = ModelConfig(path=str(make_folder(tmp_path)), max_model_len=64)
    facts = inspect_model(model)
    assert (facts.architecture, facts.context, facts.weight_bytes) == ("Tiny", 64, 100)
    (tmp_path / "model.safetensors").unlink()
    assert inspect_model(model, needs_weights=False).context == 64, "who loads none needs none"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 128}}))
    assert inspect_model(model, needs_weights=False).context == 128, "a text model inside another"
    assert inspect_model(ModelConfig(path="Qwen/Qwen2.5-0.5B-Instruct")).is_remote


@pytest.mark.parametrize(
    ("missing", "length", "said"),
    [
        ("tokenizer.json", 64, "has no tokenizer"),
        ("model.safetensors", 64, "has no weights"),
        ("config.json", 64, "has no config.json"),
        ("", 65, "max_model_len is 65, .* context of 64"),
        (".", 64, "is not a folder"),
    ],
)
def test_a_model_folder_that_will_not_do_is_refused(
    tmp_path: Path, missing: str, length: int, said: str
) -> None:
    folder = make_folder(tmp_path / "model")
    if missing == ".":
        shutil.rmtree(folder)
    elif missing:
        (folder / missing).unlink()
    with pytest.raises(ConfigError, match=said):
        inspect_model(ModelConfig(path=str(folder), max_model_len=length))


def test_a_prompt_at_the_limit_passes_and_one_token_more_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    check_lengths({"train": rows("a b c")}, ModelFacts(folder), data(3), [])
    problem = lengths_problem(folder, rows("a", "a b c d"), data(3))
    assert "train.jsonl line 2: the prompt has 4 tokens, data.max_prompt_tokens is 3" in problem


def test_suffix_and_chat_template_count(tmp_path: Path) -> None:
    problem = lengths_problem(make_folder(tmp_path / "a"), rows("a b c"), data(3, prompt_suffix=" now"))
    assert "has 4 tokens" in problem
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ eos_token }} go"
    folder = make_folder(tmp_path / "b", chat_template=template, eos_token={"content": "END"})
    section = data(6, system_prompt="be brief")
    # system be brief / user a / END go: seven words
    assert "has 7 tokens" in lengths_problem(folder, rows("a"), section)
    check_lengths({"train": rows("a")}, ModelFacts(folder), data(6, chat_template="never"), [])


def test_a_template_that_cannot_be_rendered_here_is_left_to_the_trainer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template="{{ raise_exception('users only') }}")
    notes: list[str] = []
    check_lengths({"train": rows("a")}, ModelFacts(folder), data(3), notes)
    assert len(notes) == 1 and "users only" in notes[0] and "trainer starts" in notes[0]


@pytest.mark.parametrize(
    ("how", "prompts", "said"),
    [
        ("drop", ("a", "a b c"), "train: 1 of 2 prompts are too long and will be left out"),
        ("left", ("a b c",), "train: 1 of 1 prompts are too long and will be cut: left"),
    ],
)
def test_overlong_prompts_that_are_dropped_or_cut_are_counted(
    tmp_path: Path, how: str, prompts: tuple[str, ...], said: str
) -> None:
    folder, notes = make_folder(tmp_path), list[str]()
    check_lengths({"train": rows(*prompts)}, ModelFacts(folder), data(2, overlong_prompts=how), notes)
    assert notes == [said]
    assert "all 1 prompts" in lengths_problem(folder, rows("a b c"), data(2, overlong_prompts="drop"))


@pytest.fixture
def run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reward's own check, which starts a process, has tests of its own."""
    monkeypatch.setattr(preflight, "check_reward", lambda config, row, calls: {"called": [], "reads": {}})
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    return write_run(tmp_path)


def test_sources_are_counted_and_their_epochs_are_told(run_files: Path) -> None:
    """Ten steps of four groups, by 3 to 1: 30 of the three rows of the first and 10 of the second."""
    train = str(run_files.parent / "train.jsonl")
    sources = [{"name": "a", "path": train, "weight": 3}, {"name": "b", "path": train, "group_size": 4}]
    findings = examine(run_files, [f"data.train={json.dumps(sources)}", "trainer.steps=10"])
    assert findings.rows == {"train a": 3, "train b": 3, "eval held": 3}
    text = dict(describe(findings))
    assert "4 groups of at most 4 = 16 trajectories" in text["step"]
    assert "10 epochs of a, 3.33 epochs of b" in text["run"]


def test_a_good_config_is_explained(run_files: Path) -> None:
    findings = examine(run_files)
    assert findings.rows == {"train": 3, "eval held": 3}
    text = dict(describe(findings))
    assert "4 groups of 2 = 8 trajectories, at most 128 completion tokens" in text["step"]
    assert "on-policy" in text["staleness"]
    assert "6.67 epochs" in text["run"]
    assert text["algorithm"].startswith("advantage grpo, loss ppo per token; old logprobs: recompute")
    assert dict(describe(Findings(make_config())))["model"].startswith("model")


def test_what_a_preset_sets_is_listed(run_files: Path) -> None:
    console = Console(record=True, width=100, file=StringIO())
    explain(
        examine(run_files, ["trainer.algorithm={preset: dapo, clip_high: 0.3}"]), console, with_preset=True
    )
    text = console.export_text()
    assert "preset dapo: advantage grpo" in text
    assert "  clip_high: 0.28, but 0.3 is given" in text
    assert "  overlong.penalty: 1.0" in text
    assert "has no preset" in next(preset_lines(examine(run_files).config.trainer.algorithm))


def test_all_mistakes_are_reported_at_once(run_files: Path) -> None:
    (run_files.parent / "model" / "tokenizer.json").unlink()
    with open(run_files.parent / "train.jsonl", "a") as file:
        file.write('{"reward_model": {"ground_truth": "1"}}\n')
    with pytest.raises(ConfigError) as caught:
        examine(run_files)
    assert caught.value.exit_code == 2
    assert "2 problems" in str(caught.value)
    assert "train.jsonl line 4" in str(caught.value) and "no tokenizer" in str(caught.value)


def test_an_engine_that_is_not_installed_and_a_redis_that_is_not_reached_are_mistakes(
    run_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", f"unix://{run_files.parent}/nobody.sock")
    with pytest.raises(ConfigError) as caught:
        examine(run_files, ["rollout.engine=vllm"])
    assert "vllm, which is not installed" in str(caught.value) and "cannot reach Redis" in str(caught.value)


def test_epochs_are_shown_as_steps_or_counted_at_the_start_with_a_hubs_tokenizer(run_files: Path) -> None:
    run_files.write_text(run_files.read_text().replace("steps: 5, groups_per_step: 4", "groups_per_step: 2"))
    findings = examine(run_files, ["trainer.epochs=4", "trainer.checkpoint_every=0"])
    assert findings.config.trainer.steps == 4  # 3 rows // 2 * 4
    said = dict(describe(findings))["run"]
    assert said.startswith("4 steps = 4 epochs; ") and said.endswith("checkpoint at the end only")
    fields = ["trainer.epochs=4", "model.path=owner/name", "data.overlong_prompts=drop"]
    findings = examine(run_files, fields)
    assert any("counted with the tokenizer of owner/name" in note for note in findings.notes)
    assert dict(describe(findings))["run"].startswith("4 epochs; ")
