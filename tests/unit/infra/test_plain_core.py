"""The count of dense lines and of what the trainer imports, on a tree that is counted by hand."""

from pathlib import Path

from infra.plain_core import measure_core

DENSE = """
a, b = 1, 2
c, d = divmod(7, 2)
a, b = b, a
if (e := a + b) > 2:
    sums = [sum(i * j for i in range(2)) for j in range(2)]
known = 1
"""
TRAINER = (
    "__init__",
    "__main__",
    "service",
    "policy/__init__",
    "policy/transformers_policy",
    "algorithm/__init__",
    "algorithm/advantages",
)


def test_dense_lines_and_imported_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tidemill").mkdir()
    (tmp_path / "tidemill/__init__.py").touch()
    for folder in ("common", "services"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / "tidemill" / folder).symlink_to(f"../{folder}")
    for module in TRAINER:
        path = tmp_path / f"services/trainer/{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "common/dense.py").write_text(DENSE)
    (tmp_path / "services/trainer/service.py").write_text("import tidemill.common.dense\n")
    assert dict(measure_core(tmp_path).rows()) == {
        "lines": "8",
        "tuple assignments in 1,000 lines": "250.0",
        "walruses in 1,000 lines": "125.0",
        "nested comprehensions in 1,000 lines": "125.0",
        "vague names in 1,000 lines": "125.0",
        "files that the trainer imports": "10",
        "lines of these files": "8",
    }
