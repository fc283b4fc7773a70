"""`tidemill convert`: reads the file, writes our config, and lists what does not carry over as it is."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.common.command_line import command_line
from tidemill.common.errors import ConfigError
from tidemill.common.files import StorageError, write_atomically
from tidemill.services.console.commands import ConvertOptions
from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.fit import fit
from tidemill.services.console.convert.prime_rl import convert_prime_rl
from tidemill.services.console.convert.reading import read_options
from tidemill.services.console.convert.table import OptionTable, Project, table_of
from tidemill.services.console.convert.trl import convert_trl
from tidemill.services.console.convert.verl import convert_verl


def convert_options(project: Project, options: Mapping[str, Any]) -> Draft:
    """The config that trains as these options do; options that are not given have that project's defaults."""
    values = dict(options)
    source = str(values.pop("module", "") or values.pop("file", ""))
    draft = Draft(table_of(project), values)
    {"verl": convert_verl, "trl": convert_trl, "prime-rl": convert_prime_rl}[project](draft, source)
    fit(draft)
    draft.list_the_rest()
    return draft


PARTS = ("orchestrator.", "trainer.", "inference.")
"""Sections of prime-rl's rl.toml that may also be files of their own."""


def _check_is_recognised(file: Path, table: OptionTable, options: Mapping[str, Any]) -> None:
    """Raises ConfigError: the options are not those of a run of this project."""
    names = [table.renewed(name) for name in options if name not in ("module", "file")]
    if table.project == "prime-rl":
        unknown = [name for name in names if table.find(name) is None]
        for prefix in PARTS:
            whole = [f"{prefix}{name}" for name in unknown if table.names(f"{prefix}{name}")]
            if whole:
                name = whole[0].removeprefix(prefix)
                raise ConfigError(
                    f"{file} is one of prime-rl's part files: {name} is {whole[0]} in the run's rl.toml. "
                    "Without the other parts most of the run would become defaults. "
                    "Convert the rl.toml, or write one with the parts under [orchestrator], [trainer] and "
                    "[inference]."
                )
    if not any(table.find(name) for name in names):
        raise ConfigError(
            f"{file}: none of its options is one of {table.project}: {', '.join(names[:5])}. If it is "
            "a config of another project, say which with --from."
        )


def convert(file: Path, overrides: list[str], project: Project | None) -> Draft:
    name, options = read_options(file, overrides, project)
    _check_is_recognised(file, table_of(name), options)
    try:
        return convert_options(name, options)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{file}: an option has a value that cannot be understood ({error}). What other programs would "
            "compute can be given after the file: key=value, or NAME=value for a variable of a script."
        ) from None


def run_convert(options: ConvertOptions) -> int:
    draft = convert(options.file, options.options, options.project)
    text = draft.text(options.file.name)
    console = Console(highlight=False, stderr=options.output is None)
    if options.output is None:
        print(text, end="")
    else:
        try:
            write_atomically(options.output, text)
        except StorageError as error:
            raise ConfigError(str(error)) from None
    for verdict, style in (("lost", "red"), ("approximated", "yellow")):
        for finding in draft.findings:
            if finding.verdict == verdict:
                line = Text.assemble((f"{verdict:13}", style), f"{finding.name}: {finding.text}")
                console.print(line, soft_wrap=True)
    counts = Counter(finding.verdict for finding in draft.findings)
    console.print(
        f"{len(draft.fields)} fields; {counts['lost']} options lost, {counts['approximated']} approximated; "
        f"{counts['automatic']} need none here: the end of the file names all",
        soft_wrap=True,
    )
    problem = draft.problem()
    if problem:
        console.print(Text(problem, style="red"), soft_wrap=True)
        return 1
    if options.output is not None:
        console.print(
            f"wrote {options.output}; next: {command_line('check', str(options.output))}", soft_wrap=True
        )
    return 0
