#!/usr/bin/env bash
# watch.sh FOLDER COMMAND...: runs COMMAND, and says every ten seconds how long it takes and how much is in FOLDER by
# then. What COMMAND puts into TMPDIR, as pip its downloads, is counted. Exits as COMMAND does.
set -euo pipefail
folder=$1
shift
mkdir -p "$folder/.downloads"
TMPDIR=$(cd "$folder/.downloads" && pwd) "$@" &
pid=$!
# Also on Ctrl-C, which a command in the background does not get.
trap 'kill "$pid" 2>/dev/null || true; rm -rf "$folder/.downloads"' EXIT
next=${WATCH_S:-10}
while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if [ "$SECONDS" -ge "$next" ]; then
        next=$((SECONDS + ${WATCH_S:-10}))
        megabytes=$(du -sm "$folder" 2>/dev/null | cut -f1) || true
        echo "    $SECONDS s, ${megabytes:-0} MB"
    fi
done
code=0
wait "$pid" || code=$?
exit "$code"
