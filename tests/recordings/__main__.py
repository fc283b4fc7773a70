"""Runs recorded at an earlier commit, which the present code has to train to the same weights.

    python -m tests.recordings                            # record what is not recorded yet, and replay it
    python -m tests.recordings make --at 80bb1c51         # record with that commit's code
    python -m tests.recordings replay --checkout ../mine  # replay with the code of that checkout
    python -m tests.recordings replay --only lora --only critic

Recordings are kept in build/recordings, one folder a commit. Exits with 0 where every replay is the same,
with 1 where one differs, with 2 where one cannot be made.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tests.recordings.record import RECORDINGS_FOLDER, REPO, RecordingError, Recordings
from tests.recordings.runs import COMMIT, RECORDINGS, Recording

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, help=__doc__)

At = Annotated[str, typer.Option("--at", metavar="COMMIT", help="the commit whose code records")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="may be repeated")]
Folder = Annotated[Path, typer.Option(help="where recordings are kept")]
Checkout = Annotated[Path, typer.Option(help="the code that replays")]


@app.callback(invoke_without_command=True)
def both(context: typer.Context) -> None:
    """Record what is not recorded yet, and replay it with the present code."""
    if context.invoked_subcommand is None:
        make()
        replay()


@app.command()
def make(
    at: At = COMMIT,
    only: Only = None,
    folder: Folder = RECORDINGS_FOLDER,
    fresh: Annotated[bool, typer.Option("--fresh", help="record again what is recorded")] = False,
) -> None:
    """Record runs with the code of a commit, and print the table of their digests."""
    recordings = Recordings(at, folder.absolute(), _print)
    for recording in _chosen(only):
        recorded = recordings.make(recording, fresh)
        print(f"{recording.name:18} {' '.join(recorded.digests)}")


@app.command()
def replay(
    at: At = COMMIT, only: Only = None, folder: Folder = RECORDINGS_FOLDER, checkout: Checkout = REPO
) -> None:
    """Replay recordings with the code of a checkout, and compare."""
    recordings = Recordings(at, folder.absolute(), _print)
    num_different = 0
    for recording in _chosen(only):
        result = recordings.replay(recording, checkout.absolute())
        num_different += bool(result.differences)
        verdict = "DIFFERS" if result.differences else "same"
        print(f"{recording.name:18} {verdict:8} {result.seconds:4.0f} s  {result.digests[-1]}", flush=True)
        for difference in result.differences:
            print(f"    {difference}", flush=True)
    if num_different:
        sys.exit(1)


def _chosen(names: list[str] | None) -> list[Recording]:
    all_names = [recording.name for recording in RECORDINGS]
    for name in names or ():
        if name not in all_names:
            raise RecordingError(
                f"--only {name}: there is no such recording. There are {', '.join(all_names)}"
            )
    return [recording for recording in RECORDINGS if not names or recording.name in names]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app()
    except RecordingError as error:
        _print(str(error))
        sys.exit(2)
