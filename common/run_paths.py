"""Where the folders of runs are on this machine."""

import os
from pathlib import Path

CONFIG_FILE = "config.yaml"
"""Below a run's folder: its resolved config, as it is in Redis."""
RUNS_DIR_VARIABLE = "TIDEMILL_RUNS_DIR"


def runs_dir() -> Path:
    """The folder of all runs on this machine."""
    return Path(os.environ.get(RUNS_DIR_VARIABLE, "runs")).resolve()
