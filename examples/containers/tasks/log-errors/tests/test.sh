#!/bin/bash
set -e
python3 -I -c 'import json; assert json.load(open("/app/errors.json")) == {"09": 2, "11": 1}'
