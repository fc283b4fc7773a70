#!/bin/sh
set -e
mkdir /app/repo && cd /app/repo
git init -q -b main
git config user.name author && git config user.email author@example.com
commit() { echo "$1" > settings && git add settings && git commit -qm "$2"; }
commit 'HOST=localhost' 'Begin'
commit 'HOST=example.com' 'Go public'
commit "TOKEN=$(printf 'tide' | sha256sum | cut -c1-12)" 'Make it work on my machine'
commit 'HOST=example.com' 'Clean up'
commit 'HOST=example.org' 'Move'
