"""`python -m tidemill.services.console.exporter RUN_ID`: metrics of a whole run, and service discovery."""

import os
import sys
from typing import Annotated

import typer

from tidemill.common.errors import TidemillError
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import run_main
from tidemill.common.process.service import METRICS_HOST_VARIABLE
from tidemill.common.telemetry.logs import configure_logs
from tidemill.common.wire.keys import Keys

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_id: Annotated[str, typer.Argument(help="The run.", metavar="RUN_ID")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any.")] = 9109,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, max=10.0, help="Seconds between two readings.")
    ] = 5.0,
) -> None:
    """Serve /metrics (streams, workers and progress of a run, read from Redis) and /sd (where to scrape every
    process of the run, as Prometheus's HTTP service discovery), until SIGTERM.

    The address of Redis comes from TIDEMILL_REDIS_URL (and _USERNAME, _PASSWORD, _CA). It serves on 127.0.0.1
    unless TIDEMILL_METRICS_HOST says otherwise, and waits for the run to appear.
    """
    hide_memory()  # it has the password of Redis
    configure_logs("exporter", "exporter")
    try:
        from tidemill.services.console.look.exporter import Exporter

        host = os.environ.get(METRICS_HOST_VARIABLE, "127.0.0.1")
        raise typer.Exit(run_main(Exporter(Keys(run_id), every_s).serve(port, host)))
    except TidemillError as error:
        print(f"tidemill exporter: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


if __name__ == "__main__":
    app()
