"""Commands as the user can type them: what every hint of ours prints.

`tidemill` alone works where the environment is active. Elsewhere a hint names the program in the environment
that runs now, such as `.venv/bin/tidemill`.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

PROGRAM = "tidemill"


def command_line(*words: str) -> str:
    """The command line of `tidemill WORDS`, quoted for a shell, as it works from the working directory."""
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    script = Path(sys.executable).parent / PROGRAM
    on_path = shutil.which(PROGRAM)
    if not script.exists():
        return [_shortest(Path(sys.executable)), "-m", PROGRAM]
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(script):
        return [PROGRAM]
    return [_shortest(script)]


def _shortest(path: Path) -> str:
    """A path that a shell runs: relative where it is below the working directory."""
    try:
        relative = str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory has been removed
        return str(path)
    return relative if os.sep in relative else os.path.join(os.curdir, relative)
