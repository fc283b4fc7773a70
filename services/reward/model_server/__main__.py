"""`python -m services.reward.model_server --model PATH`: one reward model on one device."""

import os
import sys

from common.errors import TidemillError
from common.logs import configure_logs
from services.reward.model_server.options import parse_options


def main() -> int:
    """Serve until SIGTERM, finish what was accepted, and return the exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = parse_options()
    configure_logs("reward-model", f"reward-model:{options.port}")
    from services.reward.model_server.server import run_server

    try:
        return run_server(options)
    except TidemillError as error:
        print(f"tidemill reward model: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
