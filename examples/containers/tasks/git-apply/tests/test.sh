#!/bin/bash
set -e
git() { as-agent git -C /app/repo "$@"; }
[ "$(git log --format=%s fix)" = "$(printf 'Fix the greeting\nGreet')" ]
[ "$(git show fix:hello.py)" = 'print("hello")' ]
[ "$(git show main:hello.py)" = 'print("helo")' ]
