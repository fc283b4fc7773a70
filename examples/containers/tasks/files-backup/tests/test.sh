#!/bin/bash
set -e
list=$(tar -tzf /app/backup.tar.gz | grep -v '/$' | sort | tr '\n' ' ')
[ "$list" = 'src/lib/values.py src/main.py ' ]
[ "$(tar -xzOf /app/backup.tar.gz src/main.py)" = 'print("hello")' ]
