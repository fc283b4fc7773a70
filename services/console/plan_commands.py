"""The command line of `tidemill plan`. Wiring only."""

from typing import Annotated

import typer

from services.console.shared_options import ConfigFile, Json, Overrides, RunsDir


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
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
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Say how many workers, how much memory and disk a run needs, from the times of its stages.

    The times are those of the newest run with this config, unless told otherwise. The formulas are in
    docs/operations.md, "Sizing"; each is shown with its numbers.
    """
    from services.console.plan import PlanOptions
    from services.console.plan import plan as print_plan

    print_plan(PlanOptions(config, tuple(overrides or ()), run, assume, measure, as_json, runs_dir))
