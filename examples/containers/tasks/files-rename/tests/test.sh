#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
cd /app/notes
grep -qx 'buy bread' home.md
grep -qx 'call Ada' work/monday.md
grep -qx 'not a note' work/plan.csv
[ -z "$(find . -name '*.txt')" ]
