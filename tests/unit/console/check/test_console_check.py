"""What `tidemill check` finds, without starting anything; what it says of memory and of the machine."""

import json
import shutil
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.checked_runs import make_folder, write_run
from tests.support.models import write_tokenizer
from tests.support.trajectories import make_config
from tests.unit.common.run.test_special_tokens import tokenizer_of
from tidemill.common.config import DataConfig, ModelConfig, RunConfig
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.common.process import gpus
from tidemill.services.console.check import memory, preflight
from tidemill.services.console.check.explain import (
    describe,
    explain,
    preset_lines,
    print_fields,
    read_sections,
    redis_bytes,
)
from tidemill.services.console.check.memory import (
    GIB,
    check_memory,
    machine_named,
    print_machine,
    print_memory,
)
from tidemill.services.console.check.model_folder import (
    ModelFacts,
    check_lengths,
    check_teachers,
    describe_reading,
    inspect_model,
    read_special_tokens,
)
from tidemill.services.console.check.preflight import Findings, examine


def rows(*prompts: Any) -> list[Row]:
    return [Row(prompt, "", None, {}, i, f"train.jsonl line {i + 1}") for i, prompt in enumerate(prompts)]


def data(limit: int, **fields: Any) -> DataConfig:
    return DataConfig(train="train.jsonl", max_prompt_tokens=limit, **fields)


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
def test_a_model_folder_that_will_not_do_is_refused(tmp_path, missing, length, said):
    folder = make_folder(tmp_path / "model")
    if missing == ".":
        shutil.rmtree(folder)
    elif missing:
        (folder / missing).unlink()
    with pytest.raises(ConfigError, match=said):
        inspect_model(ModelConfig(path=str(folder), max_model_len=length))


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("magistral", "auto", "rewards see '4', and the thought '2 and 2' in extra_info"),
        ("magistral", "hidden", "rewards see '2 and 24'"),
        ("magistral", "shown", "rewards see '[THINK]2 and 2[/THINK]4'"),
        ("gptoss", "auto", "rewards see '4', and the thought '2 and 2' in extra_info"),
        ("qwen3", "auto", "rewards see '4'; special tokens are hidden (auto)"),
        ("unknown", "auto", "rewards see '<|muse|>2 and 2<|reply|>4'"),
    ],
)
def test_one_line_says_what_rewards_will_see_of_a_completion(tmp_path, name, setting, said):
    tokenizer_of(name).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), special_tokens=setting)
    reader = read_special_tokens(model)
    assert reader is not None and said in describe_reading(model, reader)


def test_marks_that_cannot_be_parted_are_refused_before_the_start(tmp_path):
    tokenizer_of("unknown").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.special_tokens is parted"):
        read_special_tokens(ModelConfig(path=str(tmp_path), special_tokens="parted"))


@pytest.mark.parametrize("appends_end", [False, True])
def test_an_end_token_behind_every_text_is_named_and_not_counted(tmp_path, appends_end):
    write_tokenizer(tmp_path, appends_end=appends_end)
    notes: list[str] = []
    check_lengths({"train": rows("w1 w2")}, ModelFacts(tmp_path), data(2), notes)
    assert ["add_eos_token" in note for note in notes] == [True] * appends_end


TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ eos_token }} go"


@pytest.mark.parametrize(
    ("template", "prompts", "limit", "fields", "said"),
    [
        ("", ("a b c",), 3, {}, ""),
        (
            "",
            ("a", "a b c d"),
            3,
            {},
            "train.jsonl line 2: the prompt has 4 tokens, data.max_prompt_tokens is 3",
        ),
        ("", ("a b c",), 3, {"prompt_suffix": " now"}, "has 4 tokens"),
        # system be brief / user a / END go: seven words
        (TEMPLATE, ("a",), 6, {"system_prompt": "be brief"}, "has 7 tokens"),
        (TEMPLATE, ("a",), 6, {"chat_template": "never"}, ""),
        ("", ("a b c",), 2, {"overlong_prompts": "drop"}, "all 1 prompts"),
    ],
)
def test_prompts_have_no_more_tokens_than_they_may(tmp_path, template, prompts, limit, fields, said):
    settings = {"chat_template": template, "eos_token": {"content": "END"}} if template else {}
    folder = ModelFacts(make_folder(tmp_path, **settings))
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_lengths({"train": rows(*prompts)}, folder, data(limit, **fields), [])


@pytest.mark.parametrize(
    ("template", "how", "said"),
    [
        ("", "drop", "train: 1 of 2 prompts are too long and will be left out"),
        ("", "left", "train: 1 of 2 prompts are too long and will be cut: left"),
        ("{{ raise_exception('users only') }}", "error", "users only"),
    ],
)
def test_what_is_dropped_cut_or_left_to_the_trainer_is_noted(tmp_path, template, how, said):
    folder = make_folder(tmp_path, **({"chat_template": template} if template else {}))
    notes = list[str]()
    check_lengths({"train": rows("a", "a b c")}, ModelFacts(folder), data(2, overlong_prompts=how), notes)
    assert len(notes) == 1 and said in notes[0]


def test_prompts_with_text_that_the_tokenizer_does_not_know_are_counted(tmp_path):
    """Its words are w0 to w28."""
    write_tokenizer(tmp_path)
    notes: list[str] = []
    prompts = {"train": rows("w1 w2", "w1 \U0001f600 w2", "w3", "\u0645\u0631\u062d\u0628\u0627", "<unk> w1")}
    check_lengths(prompts, ModelFacts(tmp_path), data(64), notes)
    (note,) = notes
    assert note.startswith(
        "train: 2 of 5 prompts have text that the tokenizer does not know, such as '\U0001f600'"
    )
    assert "train.jsonl line 2" in note and "the model reads <unk> in its place" in note


@pytest.fixture
def run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reward's own check, which starts a process, has tests of its own."""
    monkeypatch.setattr(
        preflight,
        "check_reward",
        lambda *_: {"called": [], "reads": {}, "faults": [], "gets": [], "columns": {}},
    )
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


def test_the_check_of_rewards_gets_what_rows_have_and_whether_thoughts_are_parted(
    run_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def check_reward(config: Any, row: Any, calls: bool, columns: Any) -> dict[str, Any]:
        asked.append((config.model.special_tokens, set(columns)))
        return {"called": [], "reads": {}, "faults": [], "gets": [], "columns": {"gsm8k": ["level"]}}

    monkeypatch.setattr(preflight, "check_reward", check_reward)
    first = {"prompt": "a b", "ground_truth": "1"}
    rows = [json.dumps(first), json.dumps(first | {"extra_info": {"level": 1}})]
    (run_files.parent / "train.jsonl").write_text("\n".join(rows))
    (run_files.parent / "held.jsonl").write_text(json.dumps(first | {"extra_info": {"other": 1}}))
    findings = examine(run_files, [f"data.eval={{held: {run_files.parent}/held.jsonl}}"])
    assert asked == [("hidden", {"level"})], "auto, for a tokenizer without marks; training rows alone"
    gaps = [note for note in findings.notes if note.startswith("reward gsm8k: ")]
    assert len(gaps) == 2 and "1 of 2 rows of train" in gaps[0], "of the evaluation, too"


def test_a_good_config_is_explained(run_files: Path) -> None:
    findings = examine(run_files)
    assert findings.rows == {"train": 3, "eval held": 3}
    text = dict(describe(findings))
    assert "4 groups of 2 = 8 trajectories, at most 128 completion tokens" in text["step"]
    assert "on-policy" in text["staleness"]
    assert "6.67 epochs" in text["run"]
    assert text["algorithm"].startswith(
        "advantage grpo; loss ppo, normalised per token; old logprobs: recompute"
    )
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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.eval={}"], r"expect\.eval_gain \(0\.1\) needs data\.eval"),
        (["trainer.evaluation.at_start=false"], "needs two evaluations"),
        (["trainer.evaluation={at_start: false, every: 5}"], "needs two evaluations"),
        (["trainer.evaluation={at_start: false, every: 4}"], ""),
        ([], ""),
    ],
)
def test_a_gain_that_cannot_be_measured_is_a_mistake_before_the_run(
    run_files: Path, overrides: list[str], said: str
) -> None:
    refusal = pytest.raises(ConfigError, match=said) if said else nullcontext()
    with refusal:
        examine(run_files, ["expect.eval_gain=0.1", *overrides])


def test_all_mistakes_are_reported_at_once(run_files: Path) -> None:
    (run_files.parent / "model" / "tokenizer.json").unlink()
    with open(run_files.parent / "train.jsonl", "a") as file:
        file.write('{"reward_model": {"ground_truth": "1"}}\n')
    with pytest.raises(ConfigError) as caught:
        examine(run_files)
    assert caught.value.exit_code == 2
    assert "2 problems" in str(caught.value)
    assert "train.jsonl line 4" in str(caught.value) and "no tokenizer" in str(caught.value)


@pytest.mark.parametrize("kind", ["rwkv", "recurrent_gemma", "xlstm"])
def test_a_check_refuses_it_before_anything_starts(kind: str, run_files: Path) -> None:
    file = run_files.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
    with pytest.raises(ConfigError, match=f"rollout.engine transformers cannot sample from a {kind}"):
        examine(run_files)


def test_an_engine_that_is_not_installed_and_a_redis_that_is_not_reached_are_mistakes(run_files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", f"unix://{run_files.parent}/nobody.sock")
    with pytest.raises(ConfigError) as caught:
        examine(run_files, ["rollout.engine=vllm"])
    assert "vllm, which is not installed" in str(caught.value) and "cannot reach Redis" in str(caught.value)


def test_the_oracle_plays_the_first_rows_and_is_not_asked_where_there_are_none(run_files, monkeypatch):
    asked = []

    def check_environment(config: RunConfig, rows: list[Row], plays_oracle: bool = False) -> list[str]:
        asked.append((len(rows), plays_oracle))
        return []

    monkeypatch.setattr(preflight, "check_environment", check_environment)
    overrides = ["rollout.environment.use=x.py:Env", "rollout.environment.oracle=x.py:oracle"]
    examine(run_files, overrides, calls_reward=True)
    (run_files.parent / "train.jsonl").unlink()
    with pytest.raises(ConfigError):
        examine(run_files, overrides, calls_reward=True)
    assert asked == [(3, True), (0, False)]


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


def test_what_a_number_for_failed_rewards_does_to_a_run_is_noted(run_files: Path) -> None:
    assert not any("on_failure" in note for note in examine(run_files).notes)
    (note,) = [note for note in examine(run_files, ["reward.on_failure=0"]).notes if "on_failure" in note]
    assert note.startswith("reward.on_failure is 0: ") and "drop_sample" in note


def test_a_model_without_a_slash_is_a_folder_or_a_mistake(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"modle: there is no such folder. Did you mean model\?"):
        inspect_model(ModelConfig(path="modle"))
    assert inspect_model(ModelConfig(path="Qwen/Qwen3-0.6B")).is_remote


OWN = {"a": 0, "b": 1}


def folder_of(path: Path, vocabulary: dict[str, int], special: int = 2) -> str:
    path.mkdir()
    tree = {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<eos>", "id": special}]}
    (path / "tokenizer.json").write_text(json.dumps(tree))
    return str(path)


@pytest.mark.parametrize(
    ("vocabulary", "special", "said"),
    [
        (OWN, 2, ""),
        (OWN | {"c": 3}, 2, ""),
        (None, 2, ""),  # on the hub
        ({"a": 1, "b": 0}, 2, "token 'a' is 0 in the policy's and is 1"),
        ({"a": 0}, 2, "token 'b' is 1 in the policy's and does not exist"),
        (OWN, 5, "token '<eos>' is 2 in the policy's and is 5"),
    ],
)
def test_a_teacher_of_another_tokenizer_is_refused(tmp_path, vocabulary, special, said):
    teacher = folder_of(tmp_path / "teacher", vocabulary, special) if vocabulary else "owner/on-the-hub"
    config = make_config(
        model={"path": folder_of(tmp_path / "policy", OWN)},
        reward={"rewards": {"wise": {"teacher": {"servers": "wise"}}}},
        servers={"wise": {"model": teacher, "local": {"count": 2}}},
    )
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_teachers(config)


def printed(wanted: str) -> str:
    console = Console(file=StringIO(), width=100, color_system=None)
    print_fields(wanted, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_field_of_a_section_and_those_inside_it_is_shown_with_bounds_and_default() -> None:
    silent = [field.name for section in read_sections() for field in section.fields if not field.text]
    assert silent == []
    text = printed("streams")
    for expected in ("streams.lease_s", "float, >= 0.2, <= 3600; default 30.0", "taken over"):
        assert expected in text
    assert "trainer.steps" not in text and "trainer.optimizer.lr" in printed("trainer")
    assert "trainer.steps" in printed("") and "model.path" in printed("")
    with pytest.raises(ConfigError, match="no section 'trainr'; sections are model, data"):
        print_fields("trainr")


NO_ARCHIVE = {"archive": {"enabled": False}}
RECORD = 4 * (2 * 100 + 3 * 200) + 500
"""Twice the prompt, three times the completion, and the entry's own fields."""


def held(streams: Any, **trainer: Any) -> Any:
    """A step has 4 groups of 5; two checkpoints are kept, three steps apart. Worked out by hand."""
    shape = {
        "groups_per_step": 4, "group_size": 5, "steps": 100, "checkpoint_every": 3, "keep_checkpoints": 2,
    }  # fmt: skip
    sections: dict[str, Any] = {"rollout": {"sampling": {"max_tokens": 200}}}
    sections |= {"data": {"train": "t.jsonl", "max_prompt_tokens": 100}, "streams": streams}
    return redis_bytes(make_config(trainer=shape | trainer, **sections))


@pytest.mark.parametrize(
    ("streams", "trainer", "steps", "commits"),
    [
        # This step, the one ahead, and those since the oldest kept checkpoint; 32 commits stay beside them.
        (NO_ARCHIVE, {}, 1 + 1 + 3 * 2, 6 + 32),
        (NO_ARCHIVE, {"max_staleness": 0}, 1 + 6, 6 + 32),
        (NO_ARCHIVE, {"steps": 4}, 2 + 4, 4),
        (NO_ARCHIVE, {"checkpoint_every": 0}, 2 + 100, 100),
        ({"trim": False}, {}, 2 + 100, 100),
        # The archive has the rest, but for what waits to be written: here all of it.
        ({}, {}, 2 + 100, 32),
    ],
)
def test_redis_holds_what_is_under_way_and_what_the_oldest_checkpoint_needs(streams, trainer, steps, commits):
    assert held(streams, **trainer) == steps * 20 * RECORD + commits * (2000 + 16 * 20)


def test_what_waits_for_the_archive_is_one_and_a_half_files() -> None:
    streams = {"archive": {"segment_mb": 0.25}}
    assert held(streams) == 2 * 20 * RECORD + 32 * (2000 + 16 * 20) + int(1.5 * 2**18)


PARTS = {
    "parts": {"master weights": 3.0 * GIB, "crumbs": 0.001 * GIB},
    "peak": 3.0 * GIB,
    "running": 3.0 * GIB,
}
FIT: dict[str, Any] = {
    "ranks": 2, "context": 1, "experts": 1, "tokens": 4096, "recomputed": True, "engines": 1, "ways": 2,
    "trainer": PARTS, "host": PARTS, "takes_turns": False,
    "engine": {"parts": {"weights": 1.0 * GIB}, "room": 2.0, "sequence": 1.0, "num_sequences": 2},
    "problems": [], "settings": {},
}  # fmt: skip
MACHINE = {"gpus": 4, "gpu_bytes": 8 * GIB, "host_bytes": None}


def config() -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m", "max_model_len": 8192}, "data": {"train": "t"}})


def answer(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(memory, "compute_memory", lambda *_: FIT | changes)


def test_what_fits_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch)
    lines, problems = check_memory(config(), MACHINE)
    assert lines == [
        "trainer: 2 x 3.0 of 8.0 GiB, passes of 8,192 tokens, layers computed again: master weights 3.0",
        "engines: 1 on 2 GPUs each: weights 1.0; the KV cache holds 2 sequences of 8,192 tokens",
        "host: 3.0 GiB: master weights 3.0",
    ]
    assert problems == []


def test_what_does_not_fit_comes_with_fields_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"trainer.num_ranks": 4, "trainer.gradient_checkpointing": True, "trainer.shard_ranks": None}
    answer(monkeypatch, problems=["too large"], settings=settings)
    _, problems = check_memory(config(), MACHINE)
    assert problems[0] == "memory: too large"
    wanted = "trainer.num_ranks=4, trainer.gradient_checkpointing=true, trainer.shard_ranks=null"
    assert problems[1].endswith(wanted)
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    with pytest.raises(ConfigError, match="too large"):
        print_memory(tmp_path / "c.yaml", [], MACHINE)
    with pytest.raises(ConfigError, match="has no GPU"):
        print_memory(tmp_path / "c.yaml", [], None)
    answer(monkeypatch, problems=["too large"])
    assert "take more GPUs" in check_memory(config(), MACHINE)[1][1]


def test_the_machine_is_the_one_named_else_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine_named(8, 80.0, None) == {"gpus": 8, "gpu_bytes": 80.0 * GIB, "host_bytes": None}
    monkeypatch.setattr(gpus, "TOOL", str(tmp_path / "nowhere"))
    assert machine_named(None, None, 10.0) is None
    with pytest.raises(ConfigError, match="--gpu-gib"):
        machine_named(8, None, None)
    tool = tmp_path / "tool"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = -L ] && printf "GPU 0: A\\nGPU 1: B\\n" || printf "81559\\n40960\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(gpus, "TOOL", str(tool))
    here = machine_named(None, None, None)
    assert here is not None and (here["gpus"], here["gpu_bytes"]) == (2, 40 * GIB), "the smaller of two"
    assert here["host_bytes"] > 0


def test_a_check_tells_memory_and_a_model_that_cannot_be_measured_is_no_mistake(monkeypatch, tmp_path):
    monkeypatch.setattr(
        preflight,
        "check_reward",
        lambda *_: {"called": [], "reads": {}, "faults": [], "gets": [], "columns": {}},
    )
    path = write_run(tmp_path)
    answer(monkeypatch)
    assert "2 x 3.0 of 8.0 GiB" in examine(path, machine=MACHINE).memory[0]
    answer(monkeypatch, problems=["too large"])
    with pytest.raises(ConfigError, match="too large"):
        examine(path, machine=MACHINE)

    def refuse(*_: Any) -> Any:
        raise ConfigError("no layers")

    monkeypatch.setattr(memory, "compute_memory", refuse)
    assert "was not computed: no layers" in examine(path, machine=MACHINE).notes[-1]
    assert examine(path).memory == []


def test_a_machine_on_which_the_run_would_fail_ends_the_check(monkeypatch, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    slow = {"what": "disk", "text": "0.01 GB/s", "remedy": "take a local disk", "is_problem": False}
    full = {"what": "/dev/shm", "text": "64 MiB", "remedy": "--shm-size 8g", "is_problem": True}
    monkeypatch.setattr(memory, "examine_machine", lambda *_: [slow])
    print_machine(tmp_path / "c.yaml", [], as_json=False)
    assert "take a local disk" in capsys.readouterr().out
    monkeypatch.setattr(memory, "examine_machine", lambda *_: [slow, full])
    with pytest.raises(ConfigError, match="--shm-size 8g"):
        print_machine(tmp_path / "c.yaml", [], as_json=False)
