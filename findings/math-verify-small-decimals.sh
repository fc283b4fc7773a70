#!/usr/bin/env bash
# math-verify 0.9.0: any two decimals below 5e-7 are equal, because both are rounded to six places.
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
planck = r"$6.63 \times 10^{-34}$"
electron = r"$1.6 \times 10^{-19}$"
are_equal = verify(parse(planck), parse(electron))
print(f"verify({planck}, {electron}) = {are_equal}; they differ by a factor of 10^15")
sys.exit(0 if are_equal else 1)
PYTHON
