#!/usr/bin/env bash
# math-verify 0.9.0: words are products of their letters, so anagrams are equal, and so are letters of either case.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  'math-verify[antlr4-13-2]==0.9.0' 'latex2sympy2-extended==1.11.0'
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from math_verify import parse, verify

print("math-verify", version("math-verify"))
seen = []
for truth, answer in (("listen", "silent"), ("CAB", "ABC"), ("x^2", "X^2")):
    are_equal = verify(parse(rf"\boxed{{{truth}}}"), parse(rf"\boxed{{{answer}}}"))
    print(f"verify({truth}, {answer}) = {are_equal}")
    seen.append(are_equal)
sys.exit(0 if all(seen) else 1)
PYTHON
