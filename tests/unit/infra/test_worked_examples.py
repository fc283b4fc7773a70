"""The check of worked examples: which records it looks at, what counts as an example, and as a shape."""

from pathlib import Path

import pytest

from infra.worked_examples import check, has_example, records_that_cross

RECORD = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Point:
    """Where something is."""

    x: float
'''
USER = "from tidemill.common.shapes.point import Point\n"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for file, text in files.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def crossing(root: Path, files: dict[str, str]) -> list[str]:
    return [record.name for record in records_that_cross(write_tree(root, files))]


def test_a_record_without_an_example_is_named_with_its_line_and_who_imports_it(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"common/shapes/point.py": RECORD, "services/map.py": USER})
    (problem,) = check(root)
    assert problem.startswith("common/shapes/point.py:5: Point is imported by services/map.py")


def test_a_record_that_only_its_own_folder_imports_crosses_no_room(tmp_path: Path) -> None:
    assert crossing(tmp_path, {"common/shapes/point.py": RECORD, "common/shapes/line.py": USER}) == []


@pytest.mark.parametrize(
    "user",
    [
        USER,
        "from tidemill.common.shapes import Point",
        "from tidemill.common.shapes import point\n\npoint.Point(1.0)",
        "from tidemill.common.shapes import point as places\n\nplaces.Point(1.0)",
        "def f():\n    from tidemill.common.shapes.point import Point",
    ],
)
def test_every_form_of_import_counts(tmp_path: Path, user: str) -> None:
    package = "from tidemill.common.shapes.point import Point as Point\n"
    files = {
        "common/shapes/__init__.py": package,
        "common/shapes/point.py": RECORD,
        "services/map.py": user,
    }
    assert crossing(tmp_path, files) == ["Point"]


@pytest.mark.parametrize(
    ("text", "is_record"),
    [
        ("class Point(NamedTuple): ...", True),
        ("class Point(pydantic.BaseModel): ...", True),
        ("class Base(BaseModel): ...\nclass Point(Base): ...", True),
        ("@dataclasses.dataclass\nclass Point: ...", True),
        ("class Section(BaseModel): ...\nclass Point(Section): ...", False),
        ("class Point: ...", False),
        ("class Point(Exception): ...", False),
    ],
)
def test_dataclasses_named_tuples_and_models_are_records_and_sections_are_not(
    tmp_path: Path, text: str, is_record: bool
) -> None:
    names = crossing(tmp_path, {"common/shapes/point.py": text, "services/map.py": USER})
    assert names == (["Point"] if is_record else [])


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (None, False),
        ("A point.", False),
        ("A point.\n\nExample: `x` 1.0.", True),
        ("A point.\n\n    Point(1.0)", True),
        ("A point:\n    Point(1.0)", True),
        ("A point.\n\n* one row\n  that goes on", False),
        ("Not an example.", False),
    ],
)
def test_an_example_is_a_line_that_says_so_or_an_indented_block(
    docstring: str | None, expected: bool
) -> None:
    assert has_example(docstring) is expected


@pytest.mark.parametrize(
    ("field", "has_shape"),
    [
        ("ids: Int32", False),
        ("ids: Int32 | None = None", False),
        ('ids: "Tensor"', False),
        ('ids: NDArray[np.int64]\n    """Ids [T]."""', False),
        ('ids: NDArray[np.int64]\n    """[T], of all turns."""', True),
        ("ids_T: Tensor", True),
        ("ids: dict[str, Tensor]", True),
        ("count: int", True),
    ],
)
def test_an_array_field_begins_with_its_shape(tmp_path: Path, field: str, has_shape: bool) -> None:
    text = f'class Point(NamedTuple):\n    """A point.\n\n    Example: one.\n    """\n\n    {field}\n'
    problems = check(write_tree(tmp_path, {"common/shapes/point.py": text, "services/map.py": USER}))
    assert (problems == []) is has_shape
