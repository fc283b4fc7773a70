"""A rollout worker that dies of SIGKILL behind its second payload, before the entry that claims it."""

import os
import runpy
import signal
from typing import Any

from tidemill.common.store import ClaimStore


def arrange_death(num_payloads: int = 2) -> None:
    write = ClaimStore._write
    num_left = num_payloads

    def write_and_die(*args: Any) -> None:
        nonlocal num_left
        write(*args)
        num_left -= 1
        if not num_left:
            os.kill(os.getpid(), signal.SIGKILL)

    ClaimStore._write = write_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    arrange_death()
    runpy.run_module("tidemill.services.rollout", run_name="__main__", alter_sys=True)
