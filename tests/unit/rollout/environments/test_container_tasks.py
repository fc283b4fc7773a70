"""The tasks of examples/containers, as far as they can be looked at without containers."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded import REPO

EXAMPLE = REPO / "examples" / "containers"
TASKS = sorted(path.parent for path in (EXAMPLE / "tasks").glob("*/task.toml"))
HARBORS_REWARD = "echo $((code == 0)) > /logs/verifier/reward.txt' EXIT\nset -e\n"


def test_there_are_twenty_tasks() -> None:
    assert len(TASKS) == 20 == len(list((EXAMPLE / "tasks").iterdir()))


@pytest.mark.parametrize("folder", TASKS, ids=lambda folder: folder.name)
def test_a_task_has_all_its_parts(folder: Path) -> None:
    parts = {path.name for path in folder.iterdir()}
    assert parts == {"task.toml", "instruction.md", "environment", "solution", "tests"}
    assert any(path.is_file() for path in (folder / "environment").rglob("*"))
    test = folder / "tests" / "test.sh"
    assert HARBORS_REWARD in test.read_text()
    for script in (test, folder / "solution" / "solve.sh", *folder.glob("environment/*.sh")):
        subprocess.run(["bash", "-n", script], check=True)


def test_the_datasets_have_the_tasks_in_their_order() -> None:
    instructions = [(folder / "instruction.md").read_text().strip() for folder in TASKS]
    verifiers = [json.loads(line) for line in (EXAMPLE / "verifiers.jsonl").open()]
    assert verifiers == [{"prompt": text, "task": number} for number, text in enumerate(instructions)]
    agentbox = [json.loads(line) for line in (EXAMPLE / "agentbox.jsonl").open()]
    assert [row["task_id"] for row in agentbox] == [folder.name for folder in TASKS]
    assert [row["prompt"][-1]["content"] for row in agentbox] == instructions
