"""`tidemill up` as a command: the fork server, slowest to start, is started before all other imports."""

import contextlib

from tidemill.services.console.options import UpOptions
from tidemill.services.console.processes.forks import ForkServer


def up(options: UpOptions) -> int:
    server = ForkServer.where_it_works()
    with contextlib.closing(server) if server else contextlib.nullcontext():
        from tidemill.services.console.launch.up import run_up

        return run_up(options, server=server)
