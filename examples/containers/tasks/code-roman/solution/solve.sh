#!/bin/bash
set -e
cat > roman.py <<'P'
import sys

NUMERALS = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
            (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
number = int(sys.argv[1])
text = ""
for value, numeral in NUMERALS:
    text += numeral * (number // value)
    number %= value
print(text)
P
