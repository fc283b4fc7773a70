"""`tidemill web`: serves the pages until Ctrl-C."""

import socket

import uvicorn

from common.errors import ConfigError
from common.process.programs import run_main
from services.console.options import WebOptions
from services.console.run.connection import log_nothing
from services.console.run.folder import find_run, folder_of_runs
from services.console.web.access import TOKEN_PARAMETER, Access, is_loopback
from services.console.web.app import create_app
from services.console.web.catalog import Catalog

CLOSE_S = 3
EVERYWHERE = ("0.0.0.0", "::")


def serve(options: WebOptions) -> None:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: there is no such run, or the address cannot be had.
    """
    log_nothing()
    run_main(_serve(options))


async def _serve(options: WebOptions) -> None:
    listener = _listen(options.host, options.port)
    catalog = Catalog(folder_of_runs(options.runs_dir))
    path = ""
    if options.run_id is not None:
        run_id = find_run(options.run_id, catalog.runs).run_id
        if await catalog.get(run_id) is None:
            raise ConfigError(
                f"there is no run {run_id!r} in {catalog.runs}. Give its id, or its folder of runs "
                "with --runs-dir."
            )
        path = f"run/{run_id}"
    port = listener.getsockname()[1]
    access = Access.of(options.host, port, tuple(options.host_names))
    print(_greeting(options.host, port, path, access), flush=True)
    config = uvicorn.Config(
        create_app(catalog, access),
        access_log=False,
        log_level="error",
        server_header=False,
        date_header=False,
        ws="none",
        timeout_graceful_shutdown=CLOSE_S,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another with --host or "
            "--port."
        ) from None
    return listener


def _greeting(host: str, port: int, path: str, access: Access) -> str:
    name = socket.gethostname() if host in EVERYWHERE else host
    shown = f"[{name}]" if ":" in name else name
    query = f"?{TOKEN_PARAMETER}={access.token}" if access.token else ""
    lines = [f"Pages to look at: http://{shown}:{port}/{path}{query}"]
    if not is_loopback(host):
        lines.append(
            "Others reach this port. Whoever has this address may read everything; it is sent unencrypted."
        )
    lines.append("Ctrl-C ends the pages only; runs go on.")
    return "\n".join(lines)
