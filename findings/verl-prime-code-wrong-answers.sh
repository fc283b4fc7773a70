#!/usr/bin/env bash
# verl's prime_code.compute_score with its default continuous=False raises UnboundLocalError for every wrong answer: its
# function returns `metadata_list`, which only the branch for continuous=True sets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps verl==0.9.1
"$folder/venv/bin/pip" install --quiet numpy
cat > "$folder/show.py" <<'PY'
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

package = Path(importlib.util.find_spec("verl").origin).parent
sys.path.insert(0, str(package / "utils" / "reward_score"))
import prime_code

tests = {"inputs": ["1 2"], "outputs": ["3"]}
right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
wrong = right.replace("a + b)", "a - b)")
print("verl", importlib.metadata.version("verl"))
print("right answer:", prime_code.compute_score(right, tests)[0])
try:
    score = prime_code.compute_score(wrong, tests)
except UnboundLocalError as error:
    print("wrong answer:", type(error).__name__, error)
else:
    print("wrong answer:", score)
    raise SystemExit("the behaviour has changed")
PY
"$folder/venv/bin/python" "$folder/show.py" 2>"$folder/errors" || { tail -5 "$folder/errors"; exit 1; }
