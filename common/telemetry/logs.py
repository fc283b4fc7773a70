"""Structured logs: readable lines on a terminal, JSON elsewhere when asked, quiet when all is well.

Bind `ticket`, `index` and `version` where they are known. Passwords are never logged: addresses are logged
without their credentials.
"""

import logging
import os
import sys

import structlog

FORMAT_VARIABLE = "TIDEMILL_LOG_FORMAT"
LEVEL_VARIABLE = "TIDEMILL_LOG_LEVEL"


def configure_logs(role: str, name: str = "") -> None:
    """Set up logging for this process; every line carries `role` and `worker`."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "INFO").upper(), logging.INFO)
    as_json = os.environ.get(FORMAT_VARIABLE, "") == "json"
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=36)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if not as_json else "iso", utc=as_json),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info if as_json else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")
    structlog.contextvars.bind_contextvars(role=role, **({"worker": name} if name else {}))


def _keep(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event
