"""Where the folders of runs are on this machine."""

import os
from pathlib import Path

RUNS_DIR_VARIABLE = "TIDEMILL_RUNS_DIR"


def runs_dir() -> Path:
    """The folder of all runs on this machine."""
    return Path(os.environ.get(RUNS_DIR_VARIABLE, "runs")).resolve()
