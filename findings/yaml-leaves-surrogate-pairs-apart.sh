#!/usr/bin/env bash
# PyYAML 6.0.3: the JSON text "\ud83d\ude00" (one character, U+1F600) is read as two lone surrogates, which no
# encoder takes. YAML 1.2 is meant to read JSON, and Python's json makes one character of it.
# Exits 0 while it is so, 1 where it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyyaml==6.0.3
cat > "$folder/show.py" <<'PYTHON'
import json
import sys

import yaml

text = '{"smile": "\\ud83d\\ude00"}'
by_json = json.loads(text)["smile"]
by_yaml = yaml.safe_load(text)["smile"]
print("PyYAML", yaml.__version__, "reads", text)
print("json:  ", ascii(by_json), len(by_json), "character")
print("PyYAML:", ascii(by_yaml), len(by_yaml), "characters")
try:
    by_yaml.encode()
except UnicodeEncodeError as error:
    print("PyYAML's text cannot be encoded:", error)
sys.exit(0 if (len(by_json), len(by_yaml)) == (1, 2) else 1)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
