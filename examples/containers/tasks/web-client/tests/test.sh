#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
python3 -I - <<'P'
import json
names = ("ebb", "flow", "slack")
assert json.load(open("/app/pages.json")) == {name: f"{name} has {sum(map(ord, name))} points" for name in names}
P
