"""`python -m tidemill.services.reward.sandbox.check CONFIG [--tests]`: what `tidemill check` asks of the
sandbox.

CONFIG is the sandbox section as JSON. Runs one program in a jail, prints one line, and exits with 2 if no
code can be run as configured. With `--tests` it runs nothing: it reads rows from standard input, each a line
`[origin, ground truth, columns]` as JSON, and prints as JSON for how many of them there are tests, and why
not for the first of the others.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import ConfigError
from tidemill.services.reward.sandbox.bubblewrap import SandboxError
from tidemill.services.reward.sandbox.errors import TestsError
from tidemill.services.reward.sandbox.forms import read_tests
from tidemill.services.reward.sandbox.job import make_warm_jails, probe

MAX_PROBLEMS = 20


def main(config: str, *options: str) -> int:
    sandbox = SandboxConfig.model_validate_json(config)
    if options:
        print(json.dumps(count_readable(sys.stdin, sandbox)))
        return 0
    try:
        probe(sandbox)
    except SandboxError as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    warm, sentence = make_warm_jails([sandbox])
    if warm is not None:
        warm.close()
    print(f"code runs apart from this machine: no network, no files but its own, limits; {sentence}")
    return 0


def count_readable(lines: Iterable[str], config: SandboxConfig) -> dict[str, Any]:
    """How many rows there are, how many have tests, and the reasons of the first others."""
    num_rows = 0
    num_readable = 0
    problems: list[tuple[str, str]] = []
    for line in lines:
        origin, tests, columns = json.loads(line)
        num_rows += 1
        try:
            read_tests(tests, columns, config.packages)
            num_readable += 1
        except TestsError as error:
            if len(problems) < MAX_PROBLEMS:
                problems.append((origin, str(error)))
    return {"num_rows": num_rows, "num_readable": num_readable, "problems": problems}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
