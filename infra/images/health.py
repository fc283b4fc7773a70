"""The health check of the images: does /healthz on the metrics port answer 200? Needs only Python.

The port is that of `HEALTH_PORT`, else what start.py has written down.
"""

import os
import sys
import urllib.request
from pathlib import Path

PORT_FILE = "/tmp/metrics-port"
TIMEOUT_S = 4.0

try:
    port = os.environ.get("HEALTH_PORT") or Path(PORT_FILE).read_text(encoding="utf-8")
    with urllib.request.urlopen(f"http://127.0.0.1:{int(port)}/healthz", timeout=TIMEOUT_S) as answer:
        print(answer.read(200).decode(errors="replace").strip())
except (OSError, ValueError) as error:  # URLError is an OSError
    sys.exit(f"unhealthy: {error}")
