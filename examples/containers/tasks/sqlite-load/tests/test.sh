#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
python3 -I - <<'P'
import sqlite3
database = sqlite3.connect("file:/app/tides.db?mode=ro", uri=True)
rows = database.execute("SELECT name, height FROM stations WHERE height > 10 ORDER BY height").fetchall()
assert rows == [("Bristol", 12.3), ("Mont Saint-Michel", 13.0)], rows
assert database.execute("SELECT count(*), count(DISTINCT country) FROM stations").fetchone() == (4, 3)
P
