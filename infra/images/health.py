"""The health check of the images: is the answer of /healthz on the metrics port 200? Needs only Python.

health.py [URL]      without URL: the port that start.py has written down
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path

PORT_FILE = Path("/tmp/metrics-port")
TIMEOUT_S = 4.0
ASKS_FOR_A_TOKEN = 401
"""The answer of a healthy service that wants a token."""

try:
    url = sys.argv[1] if len(sys.argv) > 1 else f"http://127.0.0.1:{int(PORT_FILE.read_text())}/healthz"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        print(f"{url}: {answer.status}")
except urllib.error.HTTPError as error:
    if error.code != ASKS_FOR_A_TOKEN:
        sys.exit(f"unhealthy: {error}")
except (OSError, ValueError) as error:
    sys.exit(f"unhealthy: {error}")
