"""`python -m tidemill` is the `tidemill` command."""

from tidemill.services.console.__main__ import main

if __name__ == "__main__":
    main()
