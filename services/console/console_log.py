"""Where the console's own log lines go: never between the lines of a live view."""

import logging
from pathlib import Path

import structlog


def log_to_file(path: Path) -> None:
    """Append to a file of the run, which stays open for as long as the process lives."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(path.open("a", buffering=1, encoding="utf-8")),
        cache_logger_on_first_use=False,
    )


def log_nothing() -> None:
    """Drop them: commands that only look say what matters themselves."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
