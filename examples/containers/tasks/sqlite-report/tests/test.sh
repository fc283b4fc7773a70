#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
[ "$(tr -d '\r' < /app/report.csv)" = "$(printf 'Grace,65\nAda,42\nEdsger,0')" ]
