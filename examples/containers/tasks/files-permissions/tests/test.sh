#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
[ "$(stat -c %a /app/run.sh /app/secret.txt /app/private | tr '\n' ' ')" = '755 600 700 ' ]
