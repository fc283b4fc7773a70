#!/usr/bin/env bash
# fetch.sh FOLDER: unpacks Debian's prometheus and promtool into FOLDER, for tests. Exits with 0 where both are on the
# PATH already.
set -euo pipefail
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
exec "$(dirname "${BASH_SOURCE[0]}")/../debian/fetch.sh" prometheus "$1" usr/bin/prometheus usr/bin/promtool
