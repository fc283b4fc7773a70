"""The check of plain lines: what breaks each rule, what is allowed, and which rooms must not have any."""

from pathlib import Path

import pytest

from infra.plain_lines import (
    REPO,
    SEEN_BY_USERS,
    Source,
    Violation,
    room_of,
    sources,
    table,
    violations_in,
)


def rules_broken_by(text: str) -> list[str]:
    return [violation.rule for violation in violations_in(text, "room/file.py")]


@pytest.mark.parametrize(
    "text",
    [
        "a, b = 1, 2",
        "a, b = [1, 2]",
        "a, *others = 1, *values",
        "a, b = (f(x) for x in values)",
        "a, b = [f(x) for x in values]",
        "a, b = f() if x else g()",
        "a, b = pair or (None, None)",
        "a = b = 0",
        "self.a = self.b = f()",
        "a, b = b, c",
    ],
)
def test_values_for_several_names_in_one_assignment_are_a_violation(text: str) -> None:
    assert rules_broken_by(text) == ["names"]


@pytest.mark.parametrize(
    "text",
    [
        "a = 1",
        "a = 1, 2",
        "a, b = f()",
        "first, *others = f()",
        "async def f() -> None:\n    a, b = await g()",
        "rows, columns = matrix.shape",
        "a, b = pair",
        "a, b = pairs[0]",
        "a, b = b, a",
        "x[i], x[j] = x[j], x[i]",
        "(only,) = values",
        "for a, b in pairs: pass",
        "sums = [a + b for a, b in pairs]",
        "with f() as (a, b): pass",
    ],
)
def test_unpacking_one_value_and_swapping_two_are_allowed(text: str) -> None:
    assert rules_broken_by(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "f(a := 1)",
        "b = 2 if (a := g()) else 3",
        "[b for c in d if (b := g(c))]",
        "if (a := f()) and (b := g()): pass",
        "while any((a := b) for b in c): pass",
        "assert (a := f())",
    ],
)
def test_a_walrus_anywhere_but_once_in_a_head_is_a_violation(text: str) -> None:
    assert rules_broken_by(text) == ["walrus"]


@pytest.mark.parametrize(
    "text",
    [
        "if (a := f()) is not None: pass",
        "if x: pass\nelif a := f(): pass",
        "while chunk := read(): pass",
        "while x and (chunk := read()) > 3: pass",
    ],
)
def test_one_walrus_in_the_head_of_an_if_or_a_while_is_allowed(text: str) -> None:
    assert rules_broken_by(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "[[x for x in row] for row in rows]",
        "[f(row) for row in sorted(g(x) for x in rows)]",
        "{key: sum(v for v in values) for key, values in items}",
        "any(all(x for x in row) for row in rows)",
    ],
)
def test_a_comprehension_in_a_comprehension_is_a_violation(text: str) -> None:
    assert rules_broken_by(text) == ["nested"]


def test_a_comprehension_with_two_loops_and_two_beside_each_other_are_allowed() -> None:
    assert rules_broken_by("[x for row in rows for x in row]") == []
    assert rules_broken_by("f([a for a in b], [c for c in d])") == []


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "found: int = 1",
        "for place in places: pass",
        "[one for one in many]",
        "def f(given): pass",
        "class Row:\n    def equals(self, other): pass",
        "def f(*, told=1): pass",
        "lambda other: 1",
        "class Row:\n    left: int",
        "self.left = 1",
        "with f() as part: pass",
        "try: pass\nexcept E as known: pass",
        "match x:\n    case [one]: pass",
        "match x:\n    case {**rest}: pass",
    ],
)
def test_a_name_that_does_not_say_what_it_holds_is_a_violation_where_it_is_bound(text: str) -> None:
    assert rules_broken_by(text) == ["vague"]


@pytest.mark.parametrize(
    "text",
    [
        "num_found = 1",
        "f(left=1)",
        "x = 'found'",
        "x = pair.left",
        "def place(): pass",
        "left_edge = found + 1",
        "class Row:\n    def __eq__(self, other): pass",
    ],
)
def test_longer_names_and_uses_of_names_are_allowed(text: str) -> None:
    assert rules_broken_by(text) == []


def test_fields_that_users_see_keep_their_names() -> None:
    text = "class KlConfig:\n    place: str\n    part: str"

    violations = violations_in(text, "common/config/algorithm_sections.py")

    assert [violation.line for violation in violations] == [3]


def test_a_violation_names_its_file_its_line_its_rule_and_what_to_do() -> None:
    (violation,) = violations_in("x = 1\n\na, b = 1, 2\n", "services/trainer/step.py")

    message = str(violation)

    assert message.startswith("services/trainer/step.py:3: names: ")
    assert "give each name a line" in message


def test_violations_are_in_the_order_of_lines() -> None:
    text = "found = 1\na = b = 0\nown = 2"

    assert [violation.line for violation in violations_in(text, "x.py")] == [1, 2, 3]


def source(file: str, num_violations: int, num_lines: int = 500) -> Source:
    violations = [Violation(file, line, "vague", "name it") for line in range(1, num_violations + 1)]
    return Source(file, num_lines, violations)


def test_the_table_counts_in_1000_lines_for_each_room_and_each_folder() -> None:
    files = [source("common/run/a.py", 1), source("common/run/b.py", 2), source("services/console/c.py", 0)]

    lines = [line.split() for line in table(files) if line]

    assert lines[1] == ["common/run", "1,000", "0.0", "0.0", "0.0", "3.0", "3.0"]
    assert lines[-1] == ["common", "+", "services", "1,500", "0.0", "0.0", "0.0", "2.0", "2.0"]


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("services/console/compare/diff.py", "services/console/compare"),
        ("services/console/commands.py", "services/console"),
        ("common/wire/keys.py", "common/wire"),
        ("tests/unit/infra/test_make.py", "tests/unit"),
        ("benchmarks/transport.py", "benchmarks"),
    ],
)
def test_a_room_is_a_folder_of_a_service_of_common_or_of_the_tests(file: str, room: str) -> None:
    assert room_of(file) == room


def test_files_are_read_from_all_folders_with_code(tmp_path: Path) -> None:
    for folder in ("common/wire", "tests/unit"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("found = 1\n")

    files = [(read.file, read.num_lines, len(read.violations)) for read in sources(tmp_path)]

    assert files == [("common/wire/a.py", 1, 1), ("tests/unit/a.py", 1, 1)]


@pytest.mark.parametrize(("file", "name"), sorted(SEEN_BY_USERS))
def test_names_that_users_see_are_still_fields(file: str, name: str) -> None:
    assert f"\n    {name}: " in (REPO / file).read_text()
