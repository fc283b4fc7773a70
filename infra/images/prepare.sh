#!/bin/sh
# What all images of Tidemill have in common: prepare.sh LOCK_FILE, as root, while an image is built.
# Installs what the base image lacks, and makes a user without rights and the folders it writes into.
set -eu
lock=$1
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
python3 "$(dirname "$0")/missing.py" "$lock" > /tmp/missing.txt
if [ -s /tmp/missing.txt ]; then
    python3 -m pip install --no-deps -r /tmp/missing.txt
fi
rm /tmp/missing.txt
groupadd --gid 10001 tidemill
useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin tidemill
# A named volume takes the owner of the folder that it is first mounted on.
for folder in /runs /cache /gpus; do
    mkdir -p "$folder"
    chown 10001:10001 "$folder"
done
