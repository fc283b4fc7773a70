#!/usr/bin/env bash
# fetch.sh FOLDER: unpacks Debian's prometheus and promtool into FOLDER, for tests. Neither installs anything nor needs
# root. Exits with 0 where both are on the PATH already.
set -euo pipefail
folder=$1
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "there is no apt-get here to fetch it with" >&2
    exit 1
fi
aside=$(mktemp -d)
trap 'rm -rf "$aside"' EXIT
mkdir -p "$aside/lists/partial" "$aside/cache/archives/partial"
# Lists and cache of our own: those of the machine may be missing, old, or root's.
apt() {
    timeout 120 apt-get -qq -o Dir::State::Lists="$aside/lists" -o Dir::Cache="$aside/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@"
}
apt update
(cd "$aside" && apt download prometheus)
dpkg-deb -x "$aside"/prometheus_*.deb "$aside/unpacked"
mkdir -p "$folder"
cp "$aside/unpacked/usr/bin/prometheus" "$aside/unpacked/usr/bin/promtool" "$folder"
