"""`python -m tidemill.services.console.exporter RUN_ID`: metrics of a whole run, and service discovery."""

import argparse
import os
import sys

from tidemill.common.errors import TidemillError
from tidemill.common.process.programs import run_main
from tidemill.common.process.service import METRICS_HOST_VARIABLE
from tidemill.common.telemetry.logs import configure_logs
from tidemill.common.wire.keys import Keys

DEFAULT_PORT = 9109


def main() -> int:
    """Export until SIGTERM; returns the exit code."""
    options = _parser().parse_args()
    configure_logs("exporter", "exporter")
    try:
        from tidemill.services.console.exporter.exporter import Exporter

        host = os.environ.get(METRICS_HOST_VARIABLE, "127.0.0.1")
        return run_main(Exporter(Keys(options.run_id), options.every_s).serve(options.port, host))
    except TidemillError as error:
        print(f"tidemill exporter: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.services.console.exporter",
        description="Serves /metrics (streams, workers and progress of a run, read from Redis) and /sd "
        "(where to scrape every process of the run, as Prometheus's HTTP service discovery).",
        epilog="The address of Redis comes from TIDEMILL_REDIS_URL (and _USERNAME, _PASSWORD, _CA). It "
        "serves on 127.0.0.1 unless TIDEMILL_METRICS_HOST says otherwise, and waits for the run to appear.",
    )
    parser.add_argument("run_id", metavar="RUN_ID", help="the run")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes any (default: %(default)s)")
    parser.add_argument(
        "--every",
        type=_interval,
        default=5.0,
        dest="every_s",
        metavar="SECONDS",
        help="between two readings (default: %(default)s)",
    )
    return parser


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 10.0:
        raise argparse.ArgumentTypeError(f"must lie between 0.1 and 10, got {value:g}")
    return value


if __name__ == "__main__":
    sys.exit(main())
