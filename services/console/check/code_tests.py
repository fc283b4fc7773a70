"""Whether the sandbox can read the tests of the rows: for how many, and why not for the others.

A process of the sandbox reads them, as its workers will; this one only sends rows, for at most `LONGEST_S`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.config.reward_kinds import TEST_COLUMNS
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import Program, run_own

LONGEST_S = 120.0
PROGRESS_S = 10.0
MAX_SHOWN = 5
FLAG = "--tests"
"""Asks the sandbox's check to read the tests of rows from standard input, and to run nothing."""


def check_code_tests(config: RunConfig, rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """A note for each sandbox reward on the rows whose tests it can read; `rows` has the rows of each data
    set.

    Raises:
        ConfigError: there are none.
    """
    for name, reward in config.reward.named.items():
        if reward.sandbox is not None:
            yield _count(name, reward, rows)


def _count(name: str, reward: NamedRewardConfig, rows: Mapping[str, Sequence[Row]]) -> str:
    assert reward.sandbox is not None
    command = run_own(Program.SANDBOX_CHECK, reward.sandbox.model_dump_json(), FLAG)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    num_left_out = _send(process.stdin, _rows_of(reward, rows), name, sum(map(len, rows.values())))
    # Flushes and closes its input: from then on nothing more comes.
    output, errors = process.communicate()
    if process.returncode:
        raise ConfigError(f"reward {name}: its tests could not be read: {errors.strip()[-500:]}")
    counted = json.loads(output)
    num_rows = counted["num_rows"]
    num_readable = counted["num_readable"]
    if not num_rows:
        return f"reward {name}: it scores no row of the data"
    reasons = "".join(f"\n  {origin}: {reason}" for origin, reason in counted["problems"][:MAX_SHOWN])
    summary = f"reward {name}: the tests of {num_readable:,} of {num_rows:,} rows can be run"
    if num_left_out:
        summary += f" ({num_left_out:,} more rows were not read within {LONGEST_S:g} s)"
    if num_readable == num_rows:
        return summary
    if not num_readable:
        raise ConfigError(
            f"{summary}; the forms that can be read are in services/reward/sandbox/README.md{reasons}"
        )
    return f"{summary}; the others fail, and are never a score. The first:{reasons}"


def _rows_of(reward: NamedRewardConfig, rows: Mapping[str, Sequence[Row]]) -> Iterator[Row | None]:
    """The rows that the reward scores, and None for each that it does not."""
    for name, dataset in rows.items():
        lane = "eval" if name.startswith("eval") else "train"
        for row in dataset:
            is_scored = lane in reward.lanes and reward.scores_source(row.data_source, row.source)
            yield row if is_scored else None


def _send(stream: IO[str], rows: Iterator[Row | None], name: str, num_rows: int) -> int:
    """Write the rows as lines of JSON. Returns how many rows were left out for lack of time."""
    started = time.monotonic()
    reported = started
    for number, row in enumerate(rows):
        now = time.monotonic()
        if now > started + LONGEST_S:
            return num_rows - number
        if now > reported + PROGRESS_S:
            reported = now
            print(f"reward {name}: tests of {number:,} of {num_rows:,} rows read", file=sys.stderr)
        if row is None:
            continue
        columns = {column: row.extra[column] for column in TEST_COLUMNS if row.extra.get(column)}
        line = json.dumps([row.origin, row.ground_truth, columns], default=str)
        try:
            stream.write(line + "\n")
        except BrokenPipeError:  # its exit code and its message say why
            return 0
    return 0
