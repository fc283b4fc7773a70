"""The commands of `tidemill weights`."""

import typer

from tidemill.services.console.options import Json, RunId, RunsDir

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.command("ls", epilog="Example: tidemill weights ls arith-20260131-120000")
def show_list(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List a run's versions on the disk: full ones, and deltas with what they change."""
    from tidemill.services.console.exports.weights import list_versions

    list_versions(run_id, as_json, runs_dir)


@app.command(epilog="Example: tidemill weights verify arith-20260131-120000")
def verify(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Read every byte of every version: checksums, chains, digests. Exits with 1 where one is not whole."""
    from tidemill.services.console.exports.weights import list_versions

    if not list_versions(run_id, as_json, runs_dir, verify=True):
        raise typer.Exit(1)
