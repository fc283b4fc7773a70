"""What a config's unknown fields are called here, if they are options of verl, TRL or prime-rl."""

from collections.abc import Iterable

from tidemill.services.console.convert.prime_rl_table import TABLE as PRIME_RL
from tidemill.services.console.convert.trl_table import TABLE as TRL
from tidemill.services.console.convert.verl_table import TABLE as VERL

TABLES = (VERL, TRL, PRIME_RL)
MOST = 3
"""Meanings of one name that are shown."""


def names_elsewhere(unknown: Iterable[str]) -> str:
    """A line for each option of another project among the fields; empty where there is none."""
    lines = []
    for field in unknown:
        name = field.rpartition(".")[2]
        meanings = [
            f"{', '.join(row.targets)} ({table.project}'s {option}" + (f": {row.note})" if row.note else ")")
            for table in TABLES
            for row in table.by_last_name(name)
            for option in row.options
            if option.rpartition(".")[2] == name
        ]
        if meanings:
            lines.append(f"  {field} is {' or '.join(dict.fromkeys(meanings[:MOST]))}\n")
    hint = "  `tidemill convert` reads whole files of verl, TRL and prime-rl.\n"
    return "".join(lines) + hint if lines else ""
