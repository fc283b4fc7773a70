"""`python -m services.reward.check '{"function": ..., "kwargs": {...}}'`: can this reward be loaded?

Exits with 0, or with 2 and the reason on stderr. A process of its own, because importing a user's module
runs whatever stands in it.
"""

import json
import sys

from common.errors import ConfigError
from services.reward.functions import load_function


def main(argument: str) -> int:
    """Load the reward function; returns the exit code."""
    wanted = json.loads(argument)
    try:
        load_function(wanted["function"], wanted.get("kwargs", {}))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
