"""The command line of `tidemill archive`. Wiring only."""

from typing import Annotated

import typer

from services.console.shared_options import Json, RunId, RunsDir


def archive(
    run_id: RunId = None,
    check: Annotated[
        bool, typer.Option("--check", help="Archive nothing; read every file and compare its checksum.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write what a run's streams hold now into its archive: Parquet files in the run's folder.

    `tidemill up` does this at the end of a run by itself; this is for runs whose services were started one by
    one, or whose end was cut short. What is archived already is passed over.
    """
    from services.console.archive import archive as archive_run

    raise typer.Exit(archive_run(run_id, runs_dir, check, as_json))
