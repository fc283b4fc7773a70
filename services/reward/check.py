"""`python -m services.reward.check '{"function": ..., ...}'`: can these rewards be loaded?

Exits with 0, or with 2 and the reason on stderr. A process of its own, because importing a user's module
runs whatever stands in it.
"""

import json
import sys

from common.config import RewardConfig
from common.errors import ConfigError
from services.reward.group_functions import load_group_function
from services.reward.rewards import check_reward


def main(argument: str) -> int:
    """Check every reward of the section given as JSON; returns the exit code."""
    try:
        config = RewardConfig.model_validate(json.loads(argument))
        for name, reward in config.named.items():
            check_reward(name, reward)
        if config.group:
            load_group_function(config.group, config.group_kwargs)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
