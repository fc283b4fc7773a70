"""Writes the dashboards: `python -m infra.grafana`; with `--check`, says whether the files are current."""

import sys
from collections.abc import Sequence
from pathlib import Path

from infra.grafana.build import as_json, build_board, build_runbook
from infra.grafana.panels import BOARDS
from infra.grafana.runbook import read_runbook

DASHBOARDS = Path(__file__).parent / "dashboards"


def make_files() -> dict[Path, str]:
    """The text of each dashboard's file."""
    paragraphs = read_runbook()
    files = {
        DASHBOARDS / f"{board.name}.json": as_json(build_board(board, BOARDS, paragraphs)) for board in BOARDS
    }
    return files | {DASHBOARDS / "runbook.json": as_json(build_runbook(paragraphs, BOARDS))}


def main(arguments: Sequence[str]) -> int:
    """Write what changed, or with `--check` only name it. Returns the exit code."""
    is_check = "--check" in arguments
    files = make_files()
    changed = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    changed += (gone := sorted(set(DASHBOARDS.glob("*.json")) - files.keys()))
    for path in changed:
        print(f"{path.name} is not current: python -m infra.grafana" if is_check else f"{path.name} written")
        if not is_check and path in gone:
            path.unlink()
        elif not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
    return int(is_check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
