#!/bin/bash
set -e
sh make_repository.sh
cd repo
git merge -q colours || true
echo 'lamp: 12, red' > shop.txt
git commit -qam 'Merge colours'
