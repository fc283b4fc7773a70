#!/usr/bin/env bash
# math-verify 0.9.0: a box that ends with a full stop is not read, and a number before it is taken as the answer.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  'math-verify[antlr4-13-2]==0.9.0' 'latex2sympy2-extended==1.11.0'
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from math_verify import parse

print("math-verify", version("math-verify"))
text = r"There are 4 apples in each of 3 bags, so the total is $\boxed{12.}$"
read = parse(text)
print(f"parse({text!r}) = {read}; parse without the full stop = {parse(text.replace(chr(46) + chr(125), chr(125)))}")
sys.exit(0 if read and read[0] == 3 else 1)
PYTHON
