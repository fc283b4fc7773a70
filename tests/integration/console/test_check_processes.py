"""What `tidemill check` finds with the help of the reward service's own process."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.console.check import preflight
from services.console.check.explain import describe
from tests.support.checked_runs import make_folder, write_run


@pytest.fixture
def run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    return write_run(tmp_path)


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
        assert "it was not called (--call-reward does)" in check("raise SystemExit('called')", False)

    def test_a_call_is_told_with_its_value(self, check: Any) -> None:
        said = check("print('noise'); return float(ground_truth) / 4", True)
        assert "gave 0.25 for the first training row and an empty completion" in said
        assert "noise" not in said and "not called" not in said

    def test_a_call_that_fails_is_a_mistake(self, check: Any) -> None:
        with pytest.raises(preflight.PreflightError, match=r"gave no score: .*KeyError"):
            check("return {}['no such key']", True)


def test_what_a_judge_and_a_reward_model_will_read_is_shown(run_files: Path, tmp_path: Path) -> None:
    def check(reward: dict[str, Any]) -> preflight.Findings:
        return preflight.examine(run_files, ["reward=" + json.dumps({"rewards": {"rm": reward}})])

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    folder = make_folder(tmp_path / "rm", chat_template=template)
    assert check({"model": {"local_replicas": {"model": str(folder)}}}).reads == {
        "rm": "<user>a b<assistant>(the completion)"
    }
    judge = {
        "model": "m",
        "base_urls": ["http://localhost:1/v1"],
        "template": "Q: {{ prompt }}\nA: {{ completion }}",
    }
    assert check({"judge": judge}).reads == {"rm": "user: Q: a b\nA: (the completion)"}
    broken = check({"judge": judge | {"template": "{{ extra.level }}"}})
    assert "cannot be filled in" in broken.reads["rm"]
