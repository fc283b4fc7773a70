#!/bin/sh
set -e
mkdir /app/repo && cd /app/repo
git init -q -b main
git config user.name author && git config user.email author@example.com
echo 'print("helo")' > hello.py && git add hello.py && git commit -qm 'Greet'
