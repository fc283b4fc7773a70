"""`tidemill replay`: do again what was recorded. Wiring only."""

import typer

from services.console.sandbox_commands import trajectories

app = typer.Typer(no_args_is_help=True)
app.command(epilog="Example: tidemill replay trajectories arith-1 --from 10 --to 20 --speed 10x")(
    trajectories
)
