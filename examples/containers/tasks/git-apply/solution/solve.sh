#!/bin/bash
set -e
sh make_repository.sh
cd repo
git switch -qc fix
git apply ../fix.patch
git commit -qam 'Fix the greeting'
