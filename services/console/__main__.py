"""The `tidemill` command line. Wiring only: every command imports what it needs when it is called."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.services.console.cli import dead, records, runs, weights
from tidemill.services.console.options import naming_the_run, print_version

app = typer.Typer(
    name="tidemill",
    help="Reinforcement learning for language models: rollout, reward and trainer as processes of their own "
    "that meet in Redis Streams.\n\n"
    "Begin with: tidemill check CONFIG, then: tidemill up CONFIG",
    epilog="Example: tidemill up examples/arith/config.yaml --set trainer.steps=20",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXAMPLES: dict[Callable[..., None], str] = {
    runs.check: "Example: tidemill check examples/arith/config.yaml --set trainer.max_staleness=0",
    runs.convert: "Example: tidemill convert run_grpo.sh data.train_batch_size=256 -o config.yaml",
    runs.up: "Example: tidemill up examples/arith/config.yaml --set trainer.steps=20 --run-id try-1",
    runs.status: "Example: tidemill status --json",
    runs.report: "Example: tidemill report arith-1 --json",
    runs.top: "Example: tidemill top arith-20260131-120000",
    runs.export: "Example: tidemill export arith-20260131-120000 --version best -o my-model",
    runs.diff: "Example: tidemill diff arith-1 arith-2",
    runs.archive: "Example: tidemill archive arith-20260131-120000 --check",
    runs.rescore: "Example: tidemill rescore arith-1 --reward my.py:fn --from-step 10 --to-step 20",
    records.trace: "Examples: tidemill trace 412  ·  tidemill trace 412.3 arith-1",
    records.step: "Example: tidemill step 412 arith-1 --full",
    records.timeline: "Example: tidemill timeline --from-step 40 --to-step 45 -o trace.json",
    runs.web: "Example: tidemill web arith-20260131-120000",
}
for command, example in EXAMPLES.items():
    app.command(epilog=example)(naming_the_run(command))
FAMILIES = {
    "replay": (runs.app, "Train a recorded step again, and compare."),
    "dead": (dead.app, "Messages that nobody could process: list, show, put back, drop."),
    "weights": (weights.app, "The versions of a run on the disk: list them, see that they are whole."),
    "streams": (
        records.app,
        "What a run has written: list, follow, show, search; from Redis or the archive.",
    ),
}
for name, (family, text) in FAMILIES.items():
    app.add_typer(family, name=name, help=text, no_args_is_help=True)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=print_version, help="Say which it is."),
    ] = False,
) -> None:
    """What goes before any command."""


def main() -> None:
    """Run the command; mistakes of the user are answered in plain words."""
    try:
        app()
    except TidemillError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        if isinstance(error, ConfigError) and error.unknown_fields:
            from tidemill.services.console.convert.table import names_elsewhere

            print(names_elsewhere(error.unknown_fields), end="", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
