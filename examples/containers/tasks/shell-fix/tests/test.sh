#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
folder=$(mktemp -d) && chmod 755 "$folder"
printf '1\n2\n3\n' > "$folder/plain"
printf '40\n2' > "$folder/with a space"
chmod 644 "$folder"/*
[ "$(as-agent bash /app/total.sh "$folder/plain")" = 6 ]
[ "$(as-agent bash /app/total.sh "$folder/with a space")" = 42 ]
