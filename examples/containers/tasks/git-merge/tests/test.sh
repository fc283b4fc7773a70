#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
git() { as-agent git -C /app/repo "$@"; }
[ "$(git show main:shop.txt)" = 'lamp: 12, red' ]
[ "$(git rev-parse main^2)" = "$(git rev-parse colours)" ]
[ "$(git log -1 --format=%s main^1)" = 'Raise the price' ]
