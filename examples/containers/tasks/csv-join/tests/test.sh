#!/bin/bash
set -e
[ "$(tr -d '\r' < /app/joined.csv)" = "$(printf 'name,item\nEdsger,lamp\nAda,paper\nGrace,compiler\nAda,pen')" ]
