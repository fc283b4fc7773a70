"""Folders of tasks: what a model reads, what its box has at first, a solution, and a test.

NAME/task.toml              the image (Harbor's format; only these fields are read)
NAME/instruction.md         what the model reads
NAME/environment/           the files in the box's working folder
NAME/solution/solve.sh      a solution, for checks; never in a box of a run
NAME/tests/test.sh          the test: exit code 0 is a reward of 1
"""

import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS = Path(os.environ.get("TASKS_DIR", Path(__file__).parent / "tasks"))
"""The folder with the tasks; TASKS_DIR names one of your own."""
USER = "agent"
"""Whom the model's commands run as; tests run as root."""
WORKDIR = "/app"
TEST = "/tests/test.sh"


@dataclass(frozen=True)
class TaskFolder:
    """One task, read.

    Example: `name` "csv-join", `image` "tidemill-tasks:1", `files` {"people.csv": "id,name\\n1,Ada\\n"}.
    """

    name: str
    image: str
    instruction: str
    files: dict[str, str]
    solution: str
    test: str


def read_task(folder: Path) -> TaskFolder:
    """Read one folder."""
    start = folder / "environment"
    files = [path for path in sorted(start.rglob("*")) if path.is_file()]
    return TaskFolder(
        name=folder.name,
        image=tomllib.loads((folder / "task.toml").read_text())["environment"]["docker_image"],
        instruction=(folder / "instruction.md").read_text().strip(),
        files={str(path.relative_to(start)): path.read_text() for path in files},
        solution=(folder / "solution" / "solve.sh").read_text(),
        test=(folder / "tests" / "test.sh").read_text(),
    )


def read_tasks(folder: Path = TASKS) -> Iterator[TaskFolder]:
    """Read the tasks in a folder, by name."""
    for path in sorted(folder.glob("*/task.toml")):
        yield read_task(path.parent)


def oracle(row: dict[str, Any]) -> list[Any]:
    """The turns of a model that knows the solution: for `tidemill check`, with boxes.py and shell_loop.py."""
    tasks = list(read_tasks())
    return [{"shell": {"command": tasks[row["task"]].solution}}, "done"]
