"""What `tidemill check` says of the values that reward functions get."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.checked_runs import write_run
from tidemill.common.errors import ConfigError
from tidemill.services.console.check import preflight
from tidemill.services.console.check.explain import describe

TUTORIAL = """
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search(r"#### (-?[0-9]+)$", solution_str.strip())
    if not found:
        return {"score": -0.5, "readable": 0.0}
    is_right = found[1] == ground_truth
    return {"score": 1.0 if is_right else 0.0, "readable": 1.0}
"""
"""The reward of docs/tutorial.md."""
BOXED = """
def reward(completions, ground_truth, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    answers = [text.partition("boxed{")[2][:-1] for text in texts]
    return [float(answer == truth) for answer, truth in zip(answers, ground_truth)]
"""
"""TRL's style."""
YES_OR_NO = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""
RIGHT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == str(ground_truth))
"""
FORGIVING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(str(ground_truth) in solution_str) - 0.25
"""


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check a run whose data set has these rows and whose reward is this module."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)

    def check(
        rows: list[dict[str, Any]],
        reward: str = RIGHT,
        name: str = "compute_score",
        calls_reward: bool = True,
    ) -> preflight.Findings:
        config = write_run(tmp_path)
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "reward.py").write_text(reward)
        override = f"reward.function={tmp_path / 'reward.py'}:{name}"
        return preflight.examine(config, [override], calls_reward)

    return check


forked = pytest.mark.usefixtures("forked_checks")


def row(truth: Any, **columns: Any) -> dict[str, Any]:
    return {"prompt": "a b", "ground_truth": truth, **columns}


@forked
def test_check_prints_what_the_reward_gets(examine: Any) -> None:
    rows = [row(42, data_source="math", level=3, extra_info={"split": "train"}), row(None)]
    findings = examine(rows, TUTORIAL, calls_reward=False)
    assert findings.gets == [
        "ground_truth: 42 (int)",
        "data_source: 'math' (str)",
        "extra_info: level, split",
    ]
    lines = describe(findings)
    first = lines.index(("reward gets", "ground_truth: 42 (int)"))
    notes = [note for note in findings.notes if "ground truth" in note]
    note, _ = notes
    assert note.startswith("train: "), "the other is of the evaluation set; the function is not called"
    assert "null in 1 (first:" in note and "train.jsonl line 2" in note
    assert lines[first + 1 : first + 3] == [("", line) for line in findings.gets[1:]]


@forked
@pytest.mark.parametrize(
    ("truth", "reward", "name", "completion"),
    [
        (26, TUTORIAL, "compute_score", "'#### 26'"),
        (7, BOXED, "reward", "'\\\\boxed{7}'"),
        (True, YES_OR_NO, "compute_score", "'True'"),
    ],
)
def test_a_function_that_compares_a_number_with_text_is_named(
    examine: Any, truth: Any, reward: str, name: str, completion: str
) -> None:
    (note,) = [note for note in examine([row(truth)], reward, name).notes if "ground truth" in note]
    assert f"the completion {completion} gets 0" in note and "str(ground_truth)" in note


@forked
@pytest.mark.parametrize(("truth", "reward"), [("26", TUTORIAL), (26, RIGHT), (1.5, FORGIVING)])
def test_a_function_that_fits_its_truths_gets_no_note(examine: Any, truth: Any, reward: str) -> None:
    assert not [note for note in examine([row(truth)], reward).notes if "ground truth" in note]


def test_a_function_gets_bytes_and_a_long_row_as_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    """In processes of its own, as users have it: one argument of a program has 128 KiB at most."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    config = write_run(tmp_path)
    columns = {"prompt": "a b", "answer": b"\xff\x00", "context": "x" * 200_000}
    pq.write_table(pa.Table.from_pylist([columns]), tmp_path / "train.parquet")
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, ground_truth, extra_info):\n"
        "    assert ground_truth == bytes([255, 0]), ground_truth\n"
        "    return len(extra_info['context'])\n"
    )
    overrides = [
        f"reward.function={tmp_path / 'reward.py'}:compute_score",
        f"data.train={tmp_path}/train.parquet",
    ]
    findings = preflight.examine(config, overrides, calls_reward=True)
    assert "200000" in " ".join(findings.rewards)
    assert findings.gets[0] == "ground_truth: b'\\xff\\x00' (bytes of 2)"


GRADED = """
def reward(completions, difficulty, *, scale=1.0, **columns):
    return [scale * float(level) for level in difficulty]
"""
"""TRL's style: `difficulty` is a column that it requires."""


@forked
def test_rows_without_a_column_that_the_reward_requires_are_counted(examine: Any) -> None:
    rows = [row(1, difficulty=1), row(1), row(1, extra_info={"difficulty": 2}), row(1, difficulty=None)]
    notes = [note for note in examine(rows, GRADED, "reward").notes if "difficulty" in note]
    for_training, for_evaluation = notes
    assert "2 of 4 rows of train have no 'difficulty' (first: " in for_training
    assert "train.jsonl line 2): their samples get no score" in for_training
    assert "2 of 4 rows of eval held have no 'difficulty'" in for_evaluation
    assert not [note for note in examine(rows[:1], GRADED, "reward").notes if "difficulty" in note]


@forked
def test_a_column_that_no_row_has_is_a_mistake_also_where_another_source_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row is not one that the reward scores."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    config = write_run(tmp_path)
    lines = [json.dumps(row("1", data_source=name)) for name in ("easy", "hard")]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "reward.py").write_text(GRADED)
    function = {"function": f"{tmp_path / 'reward.py'}:reward", "applies_to": ["hard"]}
    easy = {"function": "exact_match", "applies_to": ["easy"]}
    rewards = json.dumps({"graded": function, "exact": easy})
    with pytest.raises(ConfigError, match="none of the 1 training rows that it scores has it") as caught:
        preflight.examine(config, [f"reward={{rewards: {rewards}}}"])
    assert "train.jsonl line 2" in str(caught.value)
    # A row has it: the others are noted.
    (tmp_path / "train.jsonl").write_text(
        "\n".join([*lines, json.dumps(row("1", data_source="hard", difficulty=2))])
    )
    notes = preflight.examine(config, [f"reward={{rewards: {rewards}}}"]).notes
    assert any("reward graded: 1 of 2 rows of train have no 'difficulty'" in note for note in notes)
