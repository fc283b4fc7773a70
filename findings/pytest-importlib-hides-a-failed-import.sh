#!/usr/bin/env bash
# pytest 9.2.0, --import-mode=importlib: a file of tests whose import failed once has, when the same process
# collects it again, no tests and no error.
#
# In this mode the module is put into sys.modules before its lines are run, and is left there when they fail.
# The second time it is taken from there. A process that runs pytest again (a watcher, a loop over settings),
# or is forked from one that has collected, sees an empty file. With --import-mode=prepend the error is there
# both times.
#
# usage: bash findings/pytest-importlib-hides-a-failed-import.sh     (Python 3.10 or newer, network)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check pytest==9.2.0

cat > "$folder/test_a.py" <<'TESTS'
import a_library_that_is_not_there


def test_a():
    assert a_library_that_is_not_there.works()
TESTS

cat > "$folder/collect_twice.py" <<'CODE'
import sys

import pytest

words = ["test_a.py", "-q", "--collect-only", "-p", "no:cacheprovider", f"--import-mode={sys.argv[1]}"]
codes = []
for _ in range(2):
    codes.append(int(pytest.main(words)))
with open(f"codes_{sys.argv[1]}", "w") as file:
    print(*codes, file=file)
CODE

cd "$folder"
for mode in prepend importlib; do
  "$folder/venv/bin/python" collect_twice.py "$mode"
done
echo
echo "exit codes (2: an error in the collection; 5: no tests), first and second time"
echo "  prepend:   $(cat codes_prepend)"
echo "  importlib: $(cat codes_importlib)"
if [ "$(cat codes_prepend)" != "2 2" ] || [ "$(cat codes_importlib)" != "2 5" ]; then
  echo "changed: expected 2 2 and 2 5"
  exit 1
fi
