#!/bin/bash
set -e
sed -i 's,//\ len(values)$,/ len(values),; s,middle = len,values = sorted(values)\n    middle = len,' stats.py
sed -i 's,return sum(values) // len,return sum(values) / len,' stats.py
python3 -m unittest -q
