"""The page of a run's notes and bookmarks, and the two addresses under which they are written."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from tidemill.services.console.web.access import BEARER
from tidemill.services.console.web.note_files import MAX_FILE_BYTES, add_note, read_notes, remove_note
from tidemill.services.console.web.site import Page, Site
from tidemill.services.console.web.watched_run import WatchedRun


async def listed(site: Site, run: WatchedRun, request: Request) -> Response:
    """All notes of a run."""
    return await site.page("notes.html", run, request, "notes")


async def as_json(site: Site, run: WatchedRun, request: Request) -> Response:
    """All notes of a run, for programs."""
    notes = await asyncio.to_thread(read_notes, run.folder.path)
    return JSONResponse([{"id": n.note_id, "place": n.place, "text": n.text, "at": n.at} for n in notes])


async def write(site: Site, run: WatchedRun, request: Request) -> Response:
    """Keep a note, and show its page again."""
    form = await _form(site, request)
    note = await _kept(lambda: add_note(run.folder.path, form.get("place", ""), form.get("text", "")))
    return RedirectResponse(f"/run/{run.run_id}{'/' if note.path else ''}{note.place}", 303)


async def remove(site: Site, run: WatchedRun, request: Request) -> Response:
    """Remove a note, and show those that are left."""
    form = await _form(site, request)
    await _kept(lambda: remove_note(run.folder.path, form.get("id", "")))
    return RedirectResponse(f"/run/{run.run_id}/notes", 303)


async def _form(site: Site, request: Request) -> dict[str, str]:
    """The fields that were sent, once it is sure that a form of ours sent them, or a program with the token.

    Raises:
        HTTPException: another site sent them, or they are too many.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FILE_BYTES:
            raise HTTPException(413, "That is too long for a note.")
    form = dict(parse_qsl(body.decode("utf-8", "replace")))
    is_program = request.headers.get("authorization", "").startswith(BEARER)  # the gate has compared it
    if not is_program and not site.access.takes_form(form.get("key", "")):
        raise HTTPException(
            403, "This form is not from these pages, or from before a restart: load the page again."
        )
    return form


async def _kept(work: Callable[[], Any]) -> Any:
    try:
        return await asyncio.to_thread(work)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


ROUTES: dict[str, Page] = {"/run/{run}/notes": listed, "/run/{run}/notes.json": as_json}
WRITING_ROUTES: dict[str, Page] = {"/run/{run}/notes": write, "/run/{run}/notes/remove": remove}
"""Sent with POST."""
