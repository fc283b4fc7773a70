"""`python -m tidemill.services.jobs.sandbox.check CONFIG`: what isolation would code have on this machine?

CONFIG is the section as JSON. Prints one line; exits with 2 where no code can be run as configured.
"""

import sys

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import ConfigError
from tidemill.services.jobs.sandbox.jail import SandboxError
from tidemill.services.jobs.sandbox.runner import probe


def main(config: str) -> int:
    """Try the sandbox once; returns the exit code."""
    try:
        has_namespaces = probe(SandboxConfig.model_validate_json(config))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    if has_namespaces:
        print("code runs apart from this machine: no network, no files but its own, limits")
    else:
        print("code runs under limits ONLY: there are no namespaces for it here, and it reads files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
