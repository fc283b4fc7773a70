"""How plain the core is, at a commit and now: `python -m infra.plain_core 638fa2b`, or without a commit.

Of `common` and `services`: dense lines in 1,000, and what a trainer of a plain GRPO run imports. Every
assignment of several values side by side and every walrus counts here, also those that `infra.plain_lines`
allows (a swap, the head of an `if`).
"""

import ast
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.plain_lines import REPO, violations_in

FOLDERS = ("common", "services")


@dataclass(frozen=True)
class Core:
    """What was counted in one tree.

    Example: 63,178 lines with 950 tuple assignments; the trainer imports 168 files with 29,447 lines.
    """

    num_lines: int
    tuple_assignments: int
    walruses: int
    nested_comprehensions: int
    vague_names: int
    imported_files: int
    imported_lines: int

    def rows(self) -> list[tuple[str, str]]:
        """What was counted, and the figure as text."""
        return [
            ("lines", f"{self.num_lines:,}"),
            ("tuple assignments in 1,000 lines", self._per_1000(self.tuple_assignments)),
            ("walruses in 1,000 lines", self._per_1000(self.walruses)),
            ("nested comprehensions in 1,000 lines", self._per_1000(self.nested_comprehensions)),
            ("vague names in 1,000 lines", self._per_1000(self.vague_names)),
            ("files that the trainer imports", f"{self.imported_files:,}"),
            ("lines of these files", f"{self.imported_lines:,}"),
        ]

    def _per_1000(self, count: int) -> str:
        return f"{count / self.num_lines * 1000:.1f}"


def measure_core(root: Path) -> Core:
    """Count in the tree at `root`."""
    num_lines = 0
    tuple_assignments = 0
    walruses = 0
    nested_comprehensions = 0
    vague_names = 0
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text()
            num_lines += len(text.splitlines())
            for node in ast.walk(ast.parse(text)):
                tuple_assignments += _is_tuple_assignment(node)
                walruses += isinstance(node, ast.NamedExpr)
            for violation in violations_in(text, path.relative_to(root).as_posix()):
                nested_comprehensions += violation.rule == "nested"
                vague_names += violation.rule == "vague"
    imported_files, imported_lines = imports_of_trainer(root)
    return Core(
        num_lines,
        tuple_assignments,
        walruses,
        nested_comprehensions,
        vague_names,
        imported_files,
        imported_lines,
    )


def _is_tuple_assignment(node: ast.AST) -> bool:
    """`a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    is_several = isinstance(node.targets[0], ast.Tuple | ast.List)
    return is_several and isinstance(node.value, ast.Tuple | ast.List)


def imports_of_trainer(root: Path) -> tuple[int, int]:
    """Files of `common` and `services` at `root` that a trainer of a plain GRPO run imports, and their lines;
    `infra/trainer_imports.py` counts them."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    # Without the script's folder in the path: it has a folder `redis`.
    command = [sys.executable, "-P", str(REPO / "infra/trainer_imports.py")]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    num_files, _, num_lines, _ = done.stdout.replace(",", "").split()
    return int(num_files), int(num_lines)


@contextmanager
def tree_at(commit: str) -> Iterator[Path]:
    """A temporary folder with the files of `commit`."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPO, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def main(commits: list[str]) -> int:
    titles = [*commits, "now"]
    cores = []
    for commit in commits:
        with tree_at(commit) as root:
            cores.append(measure_core(root))
    cores.append(measure_core(REPO))
    print("".join([f"{'common + services':<40}", *(f"{title:>12}" for title in titles)]))
    for rows in zip(*(core.rows() for core in cores), strict=True):
        name = rows[0][0]
        print("".join([f"{name:<40}", *(f"{figure:>12}" for _, figure in rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
