#!/usr/bin/env bash
# fetch.sh [--with-libraries] PACKAGE FOLDER FILE...: unpacks files of a package of Debian into FOLDER. FILE is a path
# inside the package and may hold wildcards. With --with-libraries, FILE may also be one of a package that it depends on
# and that is not installed here. Installs nothing and needs no root.
set -euo pipefail
what=download
if [ "$1" = --with-libraries ]; then what=dependencies; shift; fi
package=$1 folder=$2
shift 2
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "there is no apt-get here to fetch $package with" >&2
    exit 1
fi
aside=$(mktemp -d)
trap 'rm -rf "$aside"' EXIT
mkdir -p "$aside/lists/partial" "$aside/cache/archives/partial" "$aside/unpacked"
# Lists and cache of our own: those of the machine may be missing, old, or root's.
apt() {
    timeout 120 apt-get -qq -o Dir::State::Lists="$aside/lists" -o Dir::Cache="$aside/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@"
}
apt update
if [ "$what" = download ]; then
    (cd "$aside/cache/archives" && apt download "$package")
else
    # Not even the lock is taken: nothing but this folder changes.
    apt install -y --no-install-recommends --download-only -o Debug::NoLocking=1 "$package"
fi
for archive in "$aside"/cache/archives/*.deb; do
    dpkg-deb -x "$archive" "$aside/unpacked"
done
mkdir -p "$folder"
for file in "$@"; do
    # Unquoted, for its wildcards; -L, because libraries are links to files with longer names.
    # A program that runs cannot be written to; its file can be replaced.
    cp -L --remove-destination "$aside"/unpacked/$file "$folder"
done
