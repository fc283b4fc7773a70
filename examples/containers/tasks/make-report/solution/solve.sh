#!/bin/bash
set -e
printf 'report.txt: $(sort $(wildcard parts/*.txt))\n\tcat $^ > $@\n' > Makefile
