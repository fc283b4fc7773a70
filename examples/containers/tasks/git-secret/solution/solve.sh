#!/bin/bash
set -e
sh make_repository.sh
cd repo
commit=$(git log --reverse --format=%H -S'TOKEN=' | head -1)
git log -1 --format=%s "$commit" > ../found.txt
git show "$commit:settings" | cut -d= -f2 > ../token.txt
