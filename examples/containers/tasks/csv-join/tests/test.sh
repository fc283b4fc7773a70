#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
[ "$(tr -d '\r' < /app/joined.csv)" = "$(printf 'name,item\nEdsger,lamp\nAda,paper\nGrace,compiler\nAda,pen')" ]
