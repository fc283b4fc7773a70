"""The command line of `tidemill archive`. Wiring only."""

from pathlib import Path
from typing import Annotated

import typer


def archive(
    run_id: Annotated[
        str | None, typer.Argument(help="The run; without it, runs/latest.", show_default=False)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Archive nothing; read every file and compare its checksum.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    runs_dir: Annotated[
        Path | None,
        typer.Option(
            "--runs-dir", metavar="FOLDER", help="Folder of all runs, as in `up`.", show_default=False
        ),
    ] = None,
) -> None:
    """Write what a run's streams hold now into its archive: Parquet files in the run's folder.

    `tidemill up` does this at the end of a run by itself; this is for runs whose services were started one by
    one, or whose end was cut short. What is archived already is passed over.
    """
    from services.console.archive import archive as archive_run

    raise typer.Exit(archive_run(run_id, runs_dir, check, as_json))
