#!/bin/bash
set -e
chmod 755 run.sh
chmod 600 secret.txt
chmod 700 private
