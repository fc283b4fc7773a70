"""The command line of `tidemill web`. Wiring only."""

from typing import Annotated

import typer

from services.console.shared_options import RunsDir


def web(
    run_id: Annotated[
        str | None, typer.Argument(help="The run to begin with; without it, all runs.", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but this machine's own asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8420,
    host_names: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A further name under which browsers may ask, such as that of a proxy. May be repeated.",
            show_default=False,
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Look at runs in a browser: curves, groups, completions token by token, steps, dead letters.

    Pages are read only, and need nothing from the network. They listen on this machine alone, unless --host
    says otherwise; then the printed address carries a token that browsers must show.
    """
    from services.console.web.server import WebOptions, serve

    serve(WebOptions(run_id, host, port, tuple(host_names or ()), runs_dir))
