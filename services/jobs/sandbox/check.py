"""`python -m tidemill.services.jobs.sandbox.check CONFIG`: can this machine run code in a jail?

CONFIG is the sandbox section as JSON. Prints one line; exits with 2 if no code can be run as configured.
"""

import sys

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import ConfigError
from tidemill.services.jobs.sandbox.jail import SandboxError
from tidemill.services.jobs.sandbox.job import probe


def main(config: str) -> int:
    try:
        probe(SandboxConfig.model_validate_json(config))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    print("code runs apart from this machine: no network, no files but its own, limits")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
