"""`python -m tidemill.services.jobs.sandbox.check CONFIG`: what isolation would code have on this machine?

CONFIG is the section as JSON. Prints one line; exits with 2 where no code can be run as configured.
"""

import sys

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import ConfigError
from tidemill.services.jobs.sandbox.runner import SandboxError, is_whole, probe


def main(config: str) -> int:
    """Try the sandbox once; returns the exit code."""
    try:
        isolation = probe(SandboxConfig.model_validate_json(config))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    if is_whole(isolation):
        print("code runs apart from this machine: no network, no files but its own, limits")
    else:
        print(
            "code runs under limits ONLY: the kernel allows no namespaces here, so it has network and files"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
