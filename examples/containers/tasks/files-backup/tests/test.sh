#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
list=$(tar -tzf /app/backup.tar.gz | grep -v '/$' | sort | tr '\n' ' ')
[ "$list" = 'src/lib/values.py src/main.py ' ]
[ "$(tar -xzOf /app/backup.tar.gz src/main.py)" = 'print("hello")' ]
