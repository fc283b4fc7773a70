"""`python -m tidemill` is the `tidemill` command."""

import sys

from tidemill.services.console.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
