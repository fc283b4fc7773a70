"""`python -m tidemill.services.trainer.check '{"advantage": ..., "loss": ...}'`: can users' own be loaded?

The argument is the section `trainer.algorithm`. Exits with 0, or with 2 and the reason on stderr. A process
of its own, because importing a user's module runs whatever stands in it.
"""

import sys

from tidemill.common.config import AlgorithmConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages.registry import find_advantage
from tidemill.services.trainer.algorithm.losses.registry import find_loss


def main(argument: str) -> int:
    """Load and try advantage and loss, as the trainer will; returns the exit code."""
    algorithm = AlgorithmConfig.model_validate_json(argument)
    try:
        find_advantage(algorithm)
        find_loss(algorithm)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
