"""Options of verl, TRL and prime-rl with our fields for them: the rows of verl.yml, trl.yml and prime_rl.yml.

The converter and the answer to an unknown field read the same rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from tidemill.common.command_line import command_line

Project = Literal["verl", "trl", "prime-rl"]
Verdict = Literal["lost", "approximated", "automatic"]
FILES: dict[Project, str] = {"verl": "verl.yml", "trl": "trl.yml", "prime-rl": "prime_rl.yml"}


class OptionRow(BaseModel):
    """One option of theirs, or several that go together; its value is copied or translated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    option: str
    """Dotted name, several with `, ` between; `*` stands for anything."""
    to: str = ""
    """Our field or fields, dotted, with `, ` between. Without one there is no counterpart."""
    note: str = ""
    """How option and field differ, or what becomes of the option."""
    computed: bool = False
    """Code (`verl.py`, `trl.py`, `prime_rl.py`) makes our field from these options, perhaps with others."""
    is_automatic: bool = False
    """It needs no option here."""
    default: Any = None
    """The project's default where ours differs: it is written even if the option was not given."""
    fallback: str = ""
    """The option whose value it has where it is not given."""
    when: str = ""
    """Conditions, with `, ` between, without which the option has no effect. Each names an option, or a field
    of ours, that must be on (`use_vllm`) or have a value (`save_strategy=steps`, `name=value|other`)."""
    values: dict[Any, Any] = Field(default_factory=dict)
    """Their value -> ours, or a mapping of several fields; null writes nothing. What is missing is copied."""
    otherwise: Any = None
    """Used for a value that is not in `values`; the value is listed as lost."""
    by: Literal["", "list", "updates", "loggers", "run_name", "range", "distance"] = ""
    """How our value is made of theirs. `list`: their list, if any is given. `updates`: steps, from a number
    of optimizer updates. `loggers`: those that we have too. `run_name`: a valid name of a run. From a bound
    or `low_high` of a ratio: `range` makes the mode and bounds of its weights, `distance` how far the upper
    bound is above 1."""
    at_most: float | None = None
    """Limit of our field: it takes the place of larger values, and means the same."""
    nearly: dict[Any, str] = Field(default_factory=dict)
    """Value -> how the result differs slightly from the original."""
    fine: dict[Any, str] = Field(default_factory=dict)
    """Value -> why it needs nothing here."""
    neutral: Any = None
    """A value (besides false, 0 and empty ones) with which nothing is lost though there is no counterpart."""

    @property
    def options(self) -> list[str]:
        return self.option.split(", ")

    @property
    def targets(self) -> list[str]:
        return self.to.split(", ") if self.to else []


class OptionTable(BaseModel):
    project: str
    renamed: dict[str, str] = Field(default_factory=dict)
    """Names in older releases -> those of today. What ends in a dot is the beginning of names: by
    `old.: new.` the option old.lr is new.lr."""
    always: dict[str, Any] = Field(default_factory=dict)
    """Our fields that have one value, whatever is given."""
    defaults: dict[str, Any]
    """The project's defaults of options that the converter computes with."""
    rows: list[OptionRow]

    def find(self, option: str) -> OptionRow | None:
        """The row about an option: one that names it before one with a pattern."""
        for row in self.rows:
            if option in row.options:
                return row
        for row in self.rows:
            if any(fnmatchcase(option, name) for name in row.options):
                return row
        return None

    def names(self, option: str) -> bool:
        """Whether a row names the option itself, rather than by a pattern."""
        return any(option in row.options for row in self.rows)

    def default(self, option: str) -> Any:
        """Their default where it is known."""
        row = self.find(option)
        return self.defaults.get(option, row.default if row else None)

    def renewed(self, option: str) -> str:
        """Its name in today's release."""
        for old, new in self.renamed.items():
            if option == old or (old.endswith(".") and option.startswith(old)):
                return new + option[len(old) :]
        return option


@cache
def table_of(project: Project) -> OptionTable:
    tree = yaml.safe_load(Path(__file__).with_name(FILES[project]).read_text(encoding="utf-8"))
    rows: list[OptionRow] = []
    for option, entry in tree.pop("fields").items():
        entries = entry if isinstance(entry, list) else [entry]
        rows += [OptionRow(option=option, **row) for row in entries]
    for kind in ("missing", "automatic"):
        for option, entry in tree.pop(kind).items():
            row = entry if isinstance(entry, dict) else {"note": entry}
            rows.append(OptionRow(option=option, is_automatic=(kind == "automatic"), **row))
    return OptionTable(rows=rows, **tree)


def _meanings_of(field: str) -> Iterator[str]:
    """Our fields that stand for an option with the last name of `field`, and whose option that is.

    For `trainer.save_steps`: "trainer.checkpoint_every (TRL's save_steps: updates there)".
    """
    name = field.rpartition(".")[2]
    for table in map(table_of, FILES):
        for row in table.rows:
            note = f": {row.note}" if row.note else ""
            for option in row.options:
                if row.to and option.rpartition(".")[2] == name:
                    yield f"{row.to} ({table.project}'s {option}{note})"


def names_elsewhere(unknown: Iterable[str]) -> str:
    """A line for each of a config's unknown fields that is an option of another project."""
    lines = []
    for field in unknown:
        meanings = list(dict.fromkeys(_meanings_of(field)))
        if meanings:
            lines.append(f"  {field} is {' or '.join(meanings[:3])}\n")
    hint = f"  `{command_line('convert')}` reads whole files of verl, TRL and prime-rl.\n"
    return "".join(lines) + hint if lines else ""


def without_guesses(message: str, guesses: Mapping[str, str]) -> str:
    """The message on unknown fields without the guesses (`ConfigError.guesses`) at those that are options of
    another project: `names_elsewhere` says what these are here."""
    for field, guess in guesses.items():
        if any(_meanings_of(field)):
            message = message.replace(f"{field}: no such field{guess}", f"{field}: no such field")
    return message
