"""`tidemill up` as a command: the fork server, slowest to start, is started before all other imports."""

import contextlib
import sys

from tidemill.services.console.commands import UpOptions
from tidemill.services.console.up.forks import ForkServer


def up(options: UpOptions) -> int:
    # Imports and checks take seconds, and tens of them on a busy machine.
    print(f"checking {options.config}", file=sys.stderr, flush=True)
    server = ForkServer.where_it_works()
    with contextlib.closing(server) if server else contextlib.nullcontext():
        from tidemill.services.console.up.start import run_up

        return run_up(options, server=server)
