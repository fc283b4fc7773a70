"""How a process of this project starts another one: by the module that this project has, and no other.

`python -m NAME` looks into the working directory first, where the user's folders are: one that is called
`services` or `common` would take the place of ours.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds `common` and `services`."""


def run_own(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    # From our own folder nothing else can be meant, and it may be what makes the modules importable.
    safe = [] if _is_own_folder() else ["-P"]
    return [sys.executable, *safe, "-m", module, *arguments]


def import_from_here() -> None:
    """Let the user's modules in the working directory be imported, after all others and our own."""
    if (folder := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _is_own_folder() -> bool:
    try:
        return Path.cwd() == ROOT
    except OSError:  # the folder has been removed
        return False
