"""Writes the dashboards: `python -m infra.grafana`; with `--check`, says whether the files are current."""

import sys
from collections.abc import Sequence
from pathlib import Path

from infra.docs.made import keep
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
    files = make_files()
    return keep(files, "infra.grafana", arguments, sorted(set(DASHBOARDS.glob("*.json")) - files.keys()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
