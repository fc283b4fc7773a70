#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
say() { as-agent python3 -I -c "import sys; sys.path.insert(0, '/app'); import stats; print(repr(stats.$1))"; }
[ "$(say 'mean([1, 2])')" = 1.5 ]
[ "$(say 'mean([2, 4, 7.5])')" = 4.5 ]
[ "$(say 'median([9, 1, 5])')" = 5 ]
[ "$(say 'median([4, 1, 3, 2])')" = 2.5 ]
[ "$(say 'median([8, 6])')" = 7.0 ]
