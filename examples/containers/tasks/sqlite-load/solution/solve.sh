#!/bin/bash
set -e
sqlite3 tides.db 'CREATE TABLE stations (name TEXT, country TEXT, height REAL)'
tail -n +2 stations.csv | sqlite3 tides.db -cmd '.mode csv' '.import /dev/stdin stations'
