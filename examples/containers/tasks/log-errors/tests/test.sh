#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
python3 -I -c 'import json; assert json.load(open("/app/errors.json")) == {"09": 2, "11": 1}'
