"""Arguments and options that many commands take, worded once."""

from pathlib import Path
from typing import Annotated

import typer

_RUN_HELP = "The run; without it, TIDEMILL_RUN_ID, else runs/latest."

RunId = Annotated[str | None, typer.Argument(help=_RUN_HELP, show_default=False)]
RunOption = Annotated[str | None, typer.Option("--run", metavar="RUN_ID", help=_RUN_HELP, show_default=False)]
"""Where the arguments say something else."""
RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir",
        metavar="FOLDER",
        help="Folder of all runs. Without it: TIDEMILL_RUNS_DIR, else ./runs.",
        show_default=False,
    ),
]
ConfigFile = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override one field, such as trainer.steps=20. May be repeated.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Full = Annotated[bool, typer.Option("--full", help="Show texts to their ends.")]
