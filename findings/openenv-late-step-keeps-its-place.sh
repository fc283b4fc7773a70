#!/usr/bin/env bash
# openenv: a client that leaves during a step keeps its place on the server until the step returns; with one place the next client
# is refused (CAPACITY_REACHED) for so long. Expected: the place is free when the connection ends. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openenv==0.10.0 fastapi==0.165.0 uvicorn==0.54.0 websockets==17.4
cd "$folder"
venv/bin/python - <<'PYTHON'
import asyncio
import contextlib
import json
import sys
import threading
from importlib.metadata import version

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

step_may_return = threading.Event()


class Slow(Environment):
    def reset(self, **_):
        return Observation()

    def step(self, action, **_):
        step_may_return.wait(60)
        return Observation()

    @property
    def state(self):
        return State()


async def answer_to_reset(port):
    async with connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as connection:
        with contextlib.suppress(ConnectionClosed):  # a full server says so, and leaves
            await connection.send(json.dumps({"type": "reset", "data": {}}))
        frame = json.loads(await connection.recv())
        return frame["data"].get("code", frame["type"])


async def main():
    server = uvicorn.Server(uvicorn.Config(create_fastapi_app(Slow, Action, Observation), port=0, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as connection:
        await connection.send(json.dumps({"type": "reset", "data": {}}))
        await connection.recv()
        await connection.send(json.dumps({"type": "step", "data": {}}))
        await asyncio.sleep(0.5)
    await asyncio.sleep(2)
    during = await answer_to_reset(port)
    step_may_return.set()
    await asyncio.sleep(2)
    after = await answer_to_reset(port)
    server.should_exit = True
    await serving
    print("openenv", version("openenv"))
    print("2 s after the first client has left, during its step:", during)
    print("after its step:", after)
    return (during, after)


sys.exit(0 if asyncio.run(main()) == ("CAPACITY_REACHED", "observation") else 1)
PYTHON
echo "as described"
