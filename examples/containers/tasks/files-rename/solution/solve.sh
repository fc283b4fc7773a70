#!/bin/bash
set -e
find notes -name '*.txt' | while read -r file; do mv "$file" "${file%.txt}.md"; done
