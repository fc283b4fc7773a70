"""Templates: how pages are filled.

Guarantees: whatever is put into a page is escaped, and characters that nobody sees are shown as marks.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from services.console.web import formats
from services.console.web.visible import sendable, visible

FOLDER = Path(__file__).parent
MAX_WORDS_CHARACTERS = 20_000
"""Of a judge's words or an error on one page."""


class Templates:
    """Renders templates."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            number=formats.number,
            signed=formats.signed,
            percent=formats.percent,
            moment=formats.moment,
            duration=formats.duration,
            counted=formats.counted,
            visible=visible,
            words=words,
        )
        self._environment.globals["span"] = formats.span

    def response(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page."""
        page = self._environment.get_template(template).render(**values)
        return HTMLResponse(sendable(page), status)


def words(value: Any, limit: int = MAX_WORDS_CHARACTERS) -> Markup:
    """Anything a user's function may have noted, as text: text as it is, the rest as JSON."""
    if not isinstance(value, str):
        try:
            value = json.dumps(_plain(value), ensure_ascii=False, indent=1)
        except (TypeError, ValueError, RecursionError):
            value = repr(value)
    return visible(value, limit)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)
