#!/usr/bin/env bash
# datasets: in a column of mixed types (stored as arrow.json), a text that is itself JSON becomes its value: the text "42"
# comes back as the number 42, the text "null" as None. Expected: the values that were given. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import sys
import datasets, pyarrow

given = ["Paris", 7, "42", "null", "[1]"]
seen = datasets.Dataset.from_dict({"answer": given}, on_mixed_types="use_json")["answer"][:]
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
print("given:", given)
print("seen: ", seen)
sys.exit(0 if seen == ["Paris", 7, 42, None, [1]] else 1)
PYTHON
echo "as described"
