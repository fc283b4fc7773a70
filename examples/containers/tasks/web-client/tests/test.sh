#!/bin/bash
set -e
python3 -I - <<'P'
import json
names = ("ebb", "flow", "slack")
assert json.load(open("/app/pages.json")) == {name: f"{name} has {sum(map(ord, name))} points" for name in names}
P
