#!/bin/bash
# Harbor reads a file, others the exit code.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
set -e
for pair in 1:I 4:IV 9:IX 14:XIV 40:XL 90:XC 444:CDXLIV 1994:MCMXCIV 2026:MMXXVI 3999:MMMCMXCIX; do
  [ "$(as-agent python3 -I /app/roman.py "${pair%:*}")" = "${pair#*:}" ]
done
