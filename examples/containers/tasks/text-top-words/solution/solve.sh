#!/bin/bash
set -e
tr 'A-Z' 'a-z' < tides.txt | grep -oE '[a-z]+' | sort | uniq -c | sort -rn | head -3 | awk '{print $2, $1}' > top.txt
