"""Numbers the trainer processes of a run, so that what they announce can be told apart and put in order.

On the disk and not in Redis, which may forget a number that was given out. Called under the run's lock.
"""

from pathlib import Path

from common.files import write_atomically

TERM_FILE = "trainer.term"
"""Below the run's folder: the number of the newest trainer process."""


def next_term(run_dir: Path) -> int:
    """A number greater than that of every trainer process before.

    Raises:
        StorageError: it cannot be written; call again.
    """
    path = run_dir / TERM_FILE
    try:
        term = int(path.read_text()) + 1
    except (FileNotFoundError, ValueError):
        term = 1
    write_atomically(path, f"{term}\n")
    return term
