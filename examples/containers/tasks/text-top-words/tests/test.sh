#!/bin/bash
set -e
[ "$(cat /app/top.txt)" = "$(printf 'the 8\ntide 5\nwheel 3')" ]
