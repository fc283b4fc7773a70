#!/bin/bash
set -e
mkdir project && cd project
git init -q -b main
git config user.name solver && git config user.email solver@example.com
echo 'A project' > README && git add README && git commit -qm 'Begin'
echo 'Free' > LICENSE && git add LICENSE && git commit -qm 'Add a license'
