"""What `tidemill check` finds with the help of the reward service's own process."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.small_vision_models import make_vision_model
from tests.support.checked_runs import make_folder, write_run
from tidemill.common.errors import ConfigError
from tidemill.common.process import checks
from tidemill.services.console.check import preflight
from tidemill.services.console.check.explain import describe

pytestmark = pytest.mark.usefixtures("forked_checks")


@pytest.fixture
def run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    return write_run(tmp_path)


def test_how_many_tokens_pictures_have_is_asked_of_the_models_own_processor(run_files: Path) -> None:
    model = make_vision_model(run_files.parent / "seeing", "qwen2_5_vl")
    overrides = [f"model.path={model}", "model.max_model_len=512", "data.max_prompt_tokens=100"]
    overrides += ["images={max_pixels: 100352}"]
    findings = preflight.examine(run_files, overrides, calls_reward=False)
    # 28 x 28 pixels a token; a strip of one token's height may have more than the 128 of a square.
    assert "at most 160 tokens each" in findings.pictures and "100 in a prompt" in findings.pictures
    (note,) = [note for note in findings.notes if "rows with such pictures are left out" in note]
    assert "may have 160 tokens" in note
    (model / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="no image processor that can be loaded"):
        checks.most_picture_tokens(findings.config)


class TestReward:
    @pytest.fixture
    def check(self, run_files: Path) -> Any:
        """Check a config whose reward does `body`."""

        def check(body: str, calls_reward: bool) -> str:
            reward = run_files.parent / "reward.py"
            head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
            reward.write_text(f"{head}\n    {body}\n")
            override = f"reward.function={reward}:compute_score"
            findings = preflight.examine(run_files, [override], calls_reward)
            return " ".join(text for _, text in describe(findings))

        return check

    def test_without_being_called_nothing_more_is_claimed(self, check: Any) -> None:
        assert "it was not called (--no-call-reward)" in check("raise SystemExit('called')", False)

    def test_a_call_is_told_with_its_value(self, check: Any) -> None:
        said = check("print('noise'); return float(ground_truth) / 4", True)
        assert "gave 0.25 for the first training row and an empty completion, 0.25 for its" in said
        assert "noise" not in said and "not called" not in said

    def test_a_call_that_fails_is_a_mistake(self, check: Any) -> None:
        with pytest.raises(ConfigError, match=r"gave no score: .*KeyError"):
            check("return {}['no such key']", True)

    @pytest.mark.parametrize(
        ("body", "argument"),
        [
            ("return 0.0 if not solution_str else {}['score']", "its ground truth as completion"),
            ("return 0.0 if solution_str in ('', ground_truth) else None", "its prompt as completion"),
        ],
    )
    def test_a_function_that_fails_on_any_text_of_a_model_is_a_mistake(self, check, body, argument):
        """On an empty completion it returns early."""
        with pytest.raises(ConfigError, match=f"called with {argument}, it gave no score"):
            check(body, True)

    def test_each_reward_that_is_wrong_is_a_mistake_by_itself(self, run_files: Path) -> None:
        (run_files.parent / "mine.py").write_text("def raises(solution_str): return 1 / 0\n")
        names = ("raises", "missing", "lost")
        trees = ", ".join(f"{name}: {{function: '{run_files.parent}/mine.py:{name}'}}" for name in names)
        with pytest.raises(ConfigError, match="3 problems") as caught:
            preflight.examine(run_files, [f"reward.rewards={{{trees}}}"], True)
        assert "reward.rewards.missing.function " in str(caught.value)
        assert "reward.rewards.lost.function " in str(caught.value)
        assert "ZeroDivisionError" in str(caught.value)

    def test_what_a_function_of_trls_gets_is_told(self, run_files: Path) -> None:
        """`"1" in completion` is False for a list of messages, and nothing fails."""
        row = {"prompt": [{"role": "user", "content": "a b"}], "ground_truth": "1"}
        (run_files.parent / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        make_folder(run_files.parent / "model", chat_template=template)
        source = "def contains(completions, **_): return [float('1' in c) for c in completions]\n"
        (run_files.parent / "mine.py").write_text(source)
        override = f"reward.function={run_files.parent}/mine.py:contains"
        lines = describe(preflight.examine(run_files, [override]))
        (form,) = [text for _, text in lines if text.startswith("completions: chats, [{'role': 'assistant'")]
        assert form.endswith("(because prompt is a list of messages): reward contains")


class TestServers:
    """Rewards with servers on this machine: what cannot work is found before anything is started."""

    @pytest.fixture
    def check(self, run_files: Path) -> Any:
        def check(reward_fields: dict[str, Any], *overrides: str) -> preflight.Findings:
            """`reward_fields` has a reward, and `asked`, its servers."""
            asked = reward_fields.pop("asked")
            sections = {"reward": {"rewards": {"rm": reward_fields}}, "servers": {"rm": asked}}
            return preflight.examine(
                run_files, [*(f"{name}={json.dumps(tree)}" for name, tree in sections.items()), *overrides]
            )

        return check

    def model(self, path: Path | str, input_form: str = "chat", **local: Any) -> dict[str, Any]:
        model = {"servers": "rm", "input": input_form}
        return {"model": model, "asked": {"model": str(path), "local": local}}

    def test_a_reward_model_that_does_not_exist(self, check: Any, tmp_path: Path) -> None:
        for path in (tmp_path / "nowhere", "models/of/mine"):
            with pytest.raises(ConfigError, match=f"servers.rm.model {path}: "):
                check(self.model(path))

    def test_a_chat_for_a_model_without_a_chat_template(self, check: Any, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "rm")
        with pytest.raises(ConfigError, match=r"reward rm: input: chat needs a chat template.*input: text"):
            check(self.model(folder))
        (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
        check(self.model(folder, args=["--chat-template", str(tmp_path / "chat.jinja")]))
        check(self.model(folder, "text"))

    def test_gpus_that_are_not_there(self, check, tmp_path, monkeypatch):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: 1)'\necho 'GPU 1: A (UUID: 2)'\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
        folder = make_folder(tmp_path / "rm", chat_template="{{ messages[0].content }}")
        check(self.model(folder, gpus=[1]), "trainer.gpus=[0]")
        with pytest.raises(ConfigError) as caught:
            check(self.model(folder, gpus=[1, 2]), "trainer.gpus=[0]", "rollout.gpus=[7]")
        assert "servers.rm.local.gpus names GPU 2; this machine has 2, 0 to 1" in str(caught.value)
        assert "rollout.gpus names GPU 7" in str(caught.value)

    def test_what_a_judge_and_a_reward_model_will_read_is_shown(self, check: Any, tmp_path: Path) -> None:
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        folder = make_folder(tmp_path / "rm", chat_template=template)
        assert check(self.model(folder)).reads == {"rm": "<user>a b<assistant>(the completion)"}
        judge = {"servers": "rm", "template": "Q: {{ prompt }}\nA: {{ completion }}"}
        asked = {"model": "m", "base_urls": ["http://localhost:1/v1"]}
        assert check({"judge": judge, "asked": asked}).reads == {"rm": "user: Q: a b\nA: (the completion)"}
        with pytest.raises(ConfigError, match=r"first training row, reward\.rewards\.rm\.judge"):
            judge |= {"template": "{{ extra.level }} {{ completion }}"}
            check({"judge": judge, "asked": asked})


class TestCodeTests:
    """Rewards of code: the tests of every row are read before anything is started."""

    ROWS = (
        {"prompt": "a", "ground_truth": {"inputs": ["1"], "outputs": ["2"]}, "data_source": "code"},
        {
            "prompt": "a",
            "ground_truth": "def check(c):\n    assert c(1) == 2",
            "data_source": "code",
            "entry_point": "f",
        },
        {"prompt": "a", "ground_truth": "def check(c):\n    assert c(1) == 2", "data_source": "code"},
        {"prompt": "a", "ground_truth": "7", "data_source": "code"},
        {"prompt": "a", "ground_truth": "7", "data_source": "math"},
    )

    @pytest.fixture
    def check(self, run_files: Path) -> Any:
        def check(*rows: dict[str, Any]) -> str:
            data = run_files.parent / "code.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            # No workers: nothing is run, so this needs no jail.
            rewards = {
                "tests": {"sandbox": {"workers": 0}, "applies_to": ["code"]},
                "math": {"function": "math", "applies_to": ["math"]},
            }
            overrides = [f"data.train={data}", "data.eval={}", f"reward={json.dumps({'rewards': rewards})}"]
            return "\n".join(preflight.examine(run_files, overrides).notes)

        return check

    def test_it_says_for_how_many_rows_there_are_tests_and_where_and_why_not(self, check: Any) -> None:
        notes = check(*self.ROWS)
        assert "the tests of 2 of 4 rows can be run" in notes
        assert "code.jsonl line 3: nothing calls check" in notes
        assert "code.jsonl line 4: the ground truth is 7" in notes
        assert "line 5" not in notes
        assert "the tests of 2 of 2 rows can be run" in check(*self.ROWS[:2])

    def test_a_run_none_of_whose_rows_has_tests_is_a_mistake(self, check: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"the tests of 0 of 1 rows(.|\n)*code.jsonl line 1: the ground truth is 7"
        ):
            check(self.ROWS[3])
