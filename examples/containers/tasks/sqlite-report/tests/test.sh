#!/bin/bash
set -e
[ "$(tr -d '\r' < /app/report.csv)" = "$(printf 'Grace,65\nAda,42\nEdsger,0')" ]
