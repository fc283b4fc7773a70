"""The command line of `tidemill plan`. Wiring only."""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Override one field. May be repeated.", show_default=False
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", help="Take the times of this run.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Do a few steps first, in a folder that is thrown away.")
    ] = False,
    assume: Annotated[
        str,
        typer.Option(
            "--assume",
            metavar="TIMES",
            help="Take these: reward=5s,rollout=2000tok/s,trainer=30s.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    runs_dir: Annotated[
        Path | None,
        typer.Option("--runs-dir", metavar="FOLDER", help="Folder of all runs.", show_default=False),
    ] = None,
) -> None:
    """Say how many workers, how much memory and disk a run needs, from the times of its stages.

    The times are those of the newest run with this config, unless told otherwise. The formulas are in
    docs/operations.md, "Sizing"; each is shown with its numbers.
    """
    from services.console.plan import PlanOptions
    from services.console.plan import plan as print_plan

    print_plan(PlanOptions(config, tuple(overrides or ()), run, assume, measure, as_json, runs_dir))
