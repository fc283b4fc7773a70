#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
git() { as-agent git -C /app/project "$@"; }
[ "$(git log --reverse --format=%s main)" = "$(printf 'Begin\nAdd a license')" ]
[ "$(git show main~1:README)" = 'A project' ]
[ "$(git show main:LICENSE)" = 'Free' ]
[ -z "$(git ls-tree main~1 LICENSE)" ]
[ -z "$(git status --porcelain)" ]
