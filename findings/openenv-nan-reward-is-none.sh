#!/usr/bin/env bash
# openenv: a reward that is NaN arrives at the client as None, which means that there was no reward. Expected: NaN, or an error.
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openenv==0.10.0 pydantic==2.14.4
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import Observation, WSObservationResponse

observation = Observation(reward=float("nan"))
sent = WSObservationResponse(data=serialize_observation(observation)).model_dump_json()
print("openenv", version("openenv"), "pydantic", version("pydantic"))
print("reward:", observation.reward)
print("sent:  ", sent)
sys.exit(0 if json.loads(sent)["data"]["reward"] is None else 1)
PYTHON
echo "as described"
