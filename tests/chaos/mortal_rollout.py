"""A rollout worker that dies of SIGKILL behind its second payload, before the entry that claims it."""

import os
import runpy
import signal
from typing import Any

from tidemill.common.store import ClaimStore


def arrange_death(num_payloads: int = 2) -> None:
    write, left = ClaimStore._write, num_payloads

    def write_and_die(*args: Any) -> None:
        nonlocal left
        write(*args)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    ClaimStore._write = write_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    arrange_death()
    runpy.run_module("tidemill.services.rollout", run_name="__main__", alter_sys=True)
