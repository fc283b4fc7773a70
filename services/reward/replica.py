"""`python -m tidemill.services.reward.replica --run RUN_ID --servers NAME -- SERVER ARGUMENTS`: one server.

Starts the server as its child, waits until it is healthy, and registers its address for all reward workers of
the run; takes the address back when it is asked to stop or the server ends. Start and stop as many as needed,
on any machine that reaches Redis, while the run goes on.
"""

import argparse
import sys

from tidemill.common.process.programs import Program
from tidemill.common.process.service import run_service


def main() -> int:
    return run_service(
        "replica",
        "Serves one replica of a judge or reward model to a run. What follows `--` goes to the server.",
        program=Program.REPLICA,
        add_arguments=_add_arguments,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", required=True, metavar="NAME", help="name in the section servers")
    parser.add_argument("--model", default="", help="model to serve (default: that of the section)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; give one that the reward workers reach (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--index", type=int, default=0, help="number of the replica, for {index} in env")
    parser.add_argument("server_args", nargs="*", help="arguments of the server, after `--`")


if __name__ == "__main__":
    sys.exit(main())
