#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
git() { as-agent git -C /app/repo "$@"; }
[ "$(git log --format=%s fix)" = "$(printf 'Fix the greeting\nGreet')" ]
[ "$(git show fix:hello.py)" = 'print("hello")' ]
[ "$(git show main:hello.py)" = 'print("helo")' ]
