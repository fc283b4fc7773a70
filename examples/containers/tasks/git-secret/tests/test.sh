#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
[ "$(cat /app/found.txt)" = 'Make it work on my machine' ]
[ "$(cat /app/token.txt)" = "$(printf 'tide' | sha256sum | cut -c1-12)" ]
