#!/bin/bash
set -e
[ "$(cat /app/largest.txt)" = old/archive.txt ]
