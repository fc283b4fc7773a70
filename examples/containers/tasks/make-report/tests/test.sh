#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
folder=$(as-agent mktemp -d)
as-agent cp -r /app/Makefile /app/parts "$folder"
cd "$folder"
as-agent make -s report.txt
[ "$(cat report.txt)" = "$(printf 'first\nsecond')" ]
as-agent make -q report.txt
echo third | as-agent tee parts/3.txt > /dev/null
as-agent touch -d 'next minute' parts/3.txt
as-agent make -s report.txt
[ "$(cat report.txt)" = "$(printf 'first\nsecond\nthird')" ]
