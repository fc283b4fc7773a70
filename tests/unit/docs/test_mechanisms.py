"""The tables of tests/README.md: each file, name and test that they give is there."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.simulation.known import KNOWN
from tidemill.common.process.programs import ROOT

README = ROOT / "tests" / "README.md"
ROOMS = ("common", "services", "infra")
QUOTED = re.compile(r"`([^`]+)`")
SCHEDULE = re.compile(r'"([^"]+)"')


@dataclass(frozen=True)
class Row:
    mechanism: str
    where: str
    """Files as `folder/name.py`, each followed by names in it; or words, for what is in many files."""
    tests: str
    """Tests as `file::test`, or a whole `file`; schedules of the simulation in double quotes."""


def rows_of(text: str) -> Iterator[Row]:
    """The rows of all tables with the columns mechanism, where, test."""
    is_inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_inside = False
        elif cells[0] == "mechanism":
            is_inside = True
        elif is_inside and not cells[0].startswith("---"):
            yield Row(*cells)


ROWS = list(rows_of(README.read_text(encoding="utf-8")))


@cache
def files_of(rooms: tuple[str, ...]) -> list[Path]:
    paths = [path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()]
    return [path for path in paths if "__pycache__" not in path.parts]


def files_named(name: str, rooms: tuple[str, ...] = ROOMS) -> list[Path]:
    """The files whose paths end with this name."""
    return [path for path in files_of(rooms) if str(path).endswith(f"/{name}")]


@cache
def names_in(path: Path) -> set[str]:
    """Names that a Python file defines: functions, classes, variables, and those of classes as Class.name."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.update((statement.name, prefix + statement.name))
            if isinstance(statement, ast.ClassDef):
                collect(statement.body, f"{statement.name}.")
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


def wrong_places(where: str) -> list[str]:
    """What a cell of the column `where` names and the source has not."""
    problems: list[str] = []
    path: Path | None = None
    for name in QUOTED.findall(where):
        if Path(name).suffix in (".py", ".lua", ".conf"):
            paths = files_named(name)
            path = paths[0] if paths else None
            if len(paths) != 1:
                problems.append(f"{name}: {len(paths)} files end with it; name one by more of its path")
        elif path is not None and name not in names_in(path):
            problems.append(f"{path.relative_to(ROOT)} has no {name}")
    return problems


def wrong_tests(tests: str) -> list[str]:
    """What a cell of the column of tests names and the folder has not."""
    problems = [f'"{name}" is not in known.py' for name in SCHEDULE.findall(tests) if name not in KNOWN]
    references = QUOTED.findall(tests)
    for reference in references:
        file, _, test = reference.partition("::")
        paths = files_named(f"{file}.py", ("tests",))
        if not paths:
            problems.append(f"{reference}: no such file")
        elif test and not any(test in names_in(path) for path in paths):
            problems.append(f"{reference}: no such test")
    return problems if references else [*problems, f"{tests!r} names no test"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.mechanism)
def test_a_mechanism_is_where_the_table_says_and_its_tests_exist(row: Row) -> None:
    assert wrong_places(row.where) + wrong_tests(row.tests) == []


def test_all_tables_are_read() -> None:
    assert len(ROWS) >= 100
    assert all(row.mechanism and row.tests for row in ROWS)


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("`consumer.py` `_settling_all`", "common/streams/consumer.py has no _settling_all"),
        ("`rollout/worker.py` `_drain`", "services/rollout/worker.py has no _drain"),
        (
            "`group_filter.py` `Group.take`",
            "services/trainer/groups/group_filter.py has no Group.take",
        ),
        ("`nowhere.py` `take`", "nowhere.py: 0 files end with it; name one by more of its path"),
    ],
)
def test_what_is_not_where_the_table_says_is_named(where: str, problem: str) -> None:
    assert wrong_places(where) == [problem]


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("`test_consumer::test_nothing_at_all`", "test_consumer::test_nothing_at_all: no such test"),
        ("`test_that_is_nowhere`", "test_that_is_nowhere: no such file"),
        ("the same", "'the same' names no test"),
        ('`test_schedules` ("a moon is lost")', '"a moon is lost" is not in known.py'),
    ],
)
def test_a_test_that_does_not_exist_is_named(tests: str, problem: str) -> None:
    assert wrong_tests(tests) == [problem]
