#!/bin/bash
set -e
[ "$(stat -c %a /app/run.sh /app/secret.txt /app/private | tr '\n' ' ')" = '755 600 700 ' ]
