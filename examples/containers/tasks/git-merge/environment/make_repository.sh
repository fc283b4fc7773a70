#!/bin/sh
set -e
mkdir /app/repo && cd /app/repo
git init -q -b main
git config user.name author && git config user.email author@example.com
printf 'lamp: 10, white\n' > shop.txt && git add shop.txt && git commit -qm 'Sell a lamp'
git switch -qc colours && printf 'lamp: 10, red\n' > shop.txt && git commit -qam 'Paint it red'
git switch -q main && printf 'lamp: 12, white\n' > shop.txt && git commit -qam 'Raise the price'
