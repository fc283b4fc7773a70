"""`python -m tidemill.services.trainer.weight_server`: weights over HTTP, where no folder is shared.

Serves nothing but manifests and the files that they name, whole or in ranges, to clients with the token:

    GET /runs/{run_id}/weights/{folder}/{file}      Authorization: Bearer TIDEMILL_WEIGHTS_TOKEN

It only reads, and needs neither torch nor Redis. The worker that downloads a file checks it.
"""

import argparse
import os
import re
import sys

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.http_server import server_config
from tidemill.common.process.json_api import MIN_TOKEN_CHARS, is_shown
from tidemill.common.process.privacy import hide_memory
from tidemill.common.run.state import runs_dir
from tidemill.common.run.weight_files import MANIFEST_FILE, WEIGHTS_FOLDER
from tidemill.common.telemetry.logs import configure_logs
from tidemill.common.weights.remote import TOKEN_VARIABLE
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import WeightManifest

FOLDER = re.compile(r"v[0-9]{8}")
"""The folder of a version: v00000008 of version 8."""


class WeightApp:
    """The HTTP side; `runs` is the folder of all runs."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.runs = runs_dir()

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", PlainTextResponse("ok\n")),
            Route("/runs/{run_id}/weights/{folder}/{name}", self._file),
        ]

    async def _file(self, request: Request) -> Response:
        if not is_shown(request.headers.get("authorization", ""), self._token):
            return PlainTextResponse(f"the token is wrong: see {TOKEN_VARIABLE}\n", 401)
        response = await run_in_threadpool(self._find, **request.path_params)
        return response or PlainTextResponse("no such version, or no such file in it\n", 404)

    def _find(self, run_id: str, folder: str, name: str) -> Response | None:
        """The file, if the run has the version and its manifest has the file. The folder of a version that is
        being pruned has another name already."""
        try:
            run = self.runs / Keys(run_id).run_id
        except TidemillError:
            return None
        if not FOLDER.fullmatch(folder):
            return None
        version = run / WEIGHTS_FOLDER / folder
        try:
            manifest = WeightManifest.model_validate_json((version / MANIFEST_FILE).read_bytes())
            served = [MANIFEST_FILE, *(file.name for file in manifest.files)]
            # The name is the manifest's and not the request's: no path leads out of the folder.
            path = version / next(listed for listed in served if listed == name)
            return FileResponse(path, stat_result=path.stat(), media_type="application/octet-stream")
        except (OSError, ValidationError, StopIteration):
            return None


def main() -> int:
    """Serve until SIGTERM; returns the exit code."""
    hide_memory()  # its environment has the token of the weights
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.services.trainer.weight_server",
        description="Serves the weights below TIDEMILL_RUNS_DIR to rollout workers on other machines.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8200, help="port to listen on (default: %(default)s)")
    options = parser.parse_args()
    configure_logs("weights", f"weights:{options.port}")
    try:
        app = WeightApp(_token())
    except TidemillError as error:
        print(f"tidemill weights: {error}", file=sys.stderr)
        return error.exit_code
    config = server_config(Starlette(routes=list(app.routes())), host=options.host, port=options.port)
    uvicorn.Server(config).run()
    return 0


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(token)} characters; expected at least {MIN_TOKEN_CHARS}. "
            "Make one with `openssl rand -base64 24`, and give it to the rollout workers too."
        )
    return token


if __name__ == "__main__":
    sys.exit(main())
