"""`python -m tidemill.services.reward.model_server --model PATH`: one reward model on one device."""

import os
import sys

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.privacy import hide_memory
from tidemill.common.run.model_config import check_folder
from tidemill.common.telemetry.logs import configure_logs
from tidemill.services.reward.model_server.options import parse_options, template_of
from tidemill.services.reward.remote.tokens import complaint, model_token


def main() -> int:
    """Serve until SIGTERM, finish what was accepted, and return the exit code."""
    hide_memory()  # its environment has the token of its clients
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = parse_options()
    configure_logs("reward-model", f"reward-model:{options.port}")
    try:
        problem = complaint(options.host, model_token())
        if problem:
            raise ConfigError(problem)
        check_folder("cannot load the reward model", options.model)  # before anything heavy is imported
        template = template_of(options)
        from tidemill.services.reward.model_server.app import run_server

        return run_server(options, template)
    except TidemillError as error:
        print(f"tidemill reward model: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
