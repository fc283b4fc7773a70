#!/bin/bash
set -e
[ "$(cat /app/found.txt)" = 'Make it work on my machine' ]
[ "$(cat /app/token.txt)" = "$(printf 'tide' | sha256sum | cut -c1-12)" ]
