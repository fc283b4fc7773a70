"""The console's end of the pipe to `guard_process`: no process outlives the console that started it."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Literal


class Guard:
    """A small process that watches this one. `with Guard() as guard:`"""

    def __enter__(self) -> "Guard":
        script = Path(__file__).with_name("guard_process.py")
        # A session of its own: the terminal's Ctrl-C and hang-up are not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def watch(self, pid: int, kind: Literal["service", "redis"]) -> None:
        """Stop this process group when the console has ended."""
        self._say(f"watch {pid} {kind}")

    def forget(self, pid: int) -> None:
        """The process has ended, and its number may come to mean another."""
        self._say(f"forget {pid}")

    def remove_at_end(self, folder: Path) -> None:
        """Remove this folder if the console ends without doing so."""
        self._say(f"remove {folder}")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a run works without its guard
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
