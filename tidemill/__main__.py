"""`python -m tidemill` is the `tidemill` command."""

import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C, as that of the command itself."""


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        from tidemill.services.console.__main__ import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
