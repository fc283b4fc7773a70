#!/bin/bash
set -e
git() { as-agent git -C /app/project "$@"; }
[ "$(git log --reverse --format=%s main)" = "$(printf 'Begin\nAdd a license')" ]
[ "$(git show main~1:README)" = 'A project' ]
[ "$(git show main:LICENSE)" = 'Free' ]
[ -z "$(git ls-tree main~1 LICENSE)" ]
[ -z "$(git status --porcelain)" ]
