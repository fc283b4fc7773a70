#!/usr/bin/env bash
# openenv: an action that a validator of its class refuses with ValueError, as pydantic's documentation shows, ends the session with
# SESSION_ERROR "Unable to serialize unknown type". Expected: VALIDATION_ERROR, as for a missing field, and the session goes on.
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openenv==0.10.0 fastapi==0.165.0 pydantic==2.14.4
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from fastapi.testclient import TestClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import field_validator


class Move(Action):
    column: int

    @field_validator("column")
    @classmethod
    def check(cls, column):
        if column > 7:
            raise ValueError("there are seven columns")
        return column


class Game(Environment):
    def reset(self, **_):
        return Observation()

    def step(self, action, **_):
        return Observation()

    @property
    def state(self):
        return State()


with TestClient(create_fastapi_app(Game, Move, Observation)).websocket_connect("/ws") as connection:
    connection.send_json({"type": "step", "data": {}})
    missing = connection.receive_json()["data"]
    connection.send_json({"type": "step", "data": {"column": 8}})
    refused = connection.receive_json()["data"]
print("openenv", version("openenv"), "pydantic", version("pydantic"))
print("without a column:", missing["code"])
print("column 8:        ", refused["code"], refused["message"])
sys.exit(0 if (missing["code"], refused["code"]) == ("VALIDATION_ERROR", "SESSION_ERROR") else 1)
PYTHON
echo "as described"
