#!/bin/bash
set -e
python3 - <<'P'
import collections, json
lines = [line.split() for line in open("app.log")]
json.dump(collections.Counter(words[0][11:13] for words in lines if words[1] == "ERROR"), open("errors.json", "w"))
P
