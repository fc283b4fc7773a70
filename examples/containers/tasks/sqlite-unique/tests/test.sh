#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
copy=$(mktemp) && cp /app/users.db "$copy"
python3 -I - "$copy" <<'P'
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
assert database.execute("SELECT id FROM users ORDER BY id").fetchall() == [(1,), (2,), (4,)]
database.execute("INSERT INTO users (address) VALUES ('barbara@example.com')")
try:
    database.execute("INSERT INTO users (address) VALUES ('ada@example.com')")
except sqlite3.IntegrityError:
    sys.exit(0)
sys.exit("an address could be added twice")
P
