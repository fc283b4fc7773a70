#!/bin/bash
set -e
cd /app/notes
grep -qx 'buy bread' home.md
grep -qx 'call Ada' work/monday.md
grep -qx 'not a note' work/plan.csv
[ -z "$(find . -name '*.txt')" ]
