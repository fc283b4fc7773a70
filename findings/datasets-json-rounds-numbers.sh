#!/usr/bin/env bash
# datasets: numbers of a column of mixed types (stored as arrow.json) are written with ten decimals, so that small ones lose
# digits: 1.343642441124012e-07 comes back as 1.344e-07. Expected: the same float64. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import sys
import datasets, pyarrow

given = ["a text", 1.343642441124012e-07, 1e-12]
seen = datasets.Dataset.from_dict({"answer": given}, on_mixed_types="use_json")["answer"][:]
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
print("given:", given)
print("seen: ", seen)
sys.exit(0 if seen[1] == 1.344e-07 and seen[2] == 0.0 else 1)
PYTHON
echo "as described"
