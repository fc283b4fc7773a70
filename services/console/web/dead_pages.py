"""Dead letters: what nobody could process. They may hold anything, so nothing of them takes effect."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from common.entries import Garbled
from common.history import History, Selection, StreamName
from common.messages import DeadLetter
from services.console.letter_view import as_tree, sample_name
from services.console.letters import Letter, decode_letter, unreadable_letter
from services.console.web.site import Site, history_of
from services.console.web.watched_run import WatchedRun

PAGE_LETTERS = 100
MAX_LETTERS = 10_000
"""Letters that are looked through, the newest."""
MAX_HEX_BYTES = 1024


class DeadPages:
    """Handlers of `/run/.../dead`."""

    def __init__(self, site: Site) -> None:
        self.site = site

    @property
    def routes(self) -> list[BaseRoute]:
        """Their addresses."""
        return [Route("/run/{run}/dead", self.letters), Route("/run/{run}/dead/{letter}", self.letter)]

    async def letters(self, request: Request) -> Response:
        """All letters, the newest first."""
        run = await self.site.run_of(request)
        needle = request.query_params.get("text", "")[:200]
        found = [letter for letter in await _read(run) if _has(letter, needle)]
        return self.site.page(
            "dead.html",
            run,
            "dead",
            letters=found[:PAGE_LETTERS],
            num_found=len(found),
            text=needle,
            sample_name=sample_name,
        )

    async def letter(self, request: Request) -> Response:
        """One letter with the message that died."""
        run = await self.site.run_of(request)
        wanted = request.path_params["letter"]
        found = next((letter for letter in await _read(run) if letter.letter_id == wanted), None)
        if found is None:
            raise HTTPException(404, "There is no such letter: it may have been put back or dropped.")
        return self.site.page(
            "letter.html",
            run,
            "dead",
            letter=found,
            message=as_tree(found, with_content=True)["message"],
            fields={name: value[:MAX_HEX_BYTES].hex(" ") for name, value in found.content.fields.items()},
            sample_name=sample_name,
        )


async def _read(run: WatchedRun) -> list[Letter]:
    history: History = history_of(run)
    max_bytes = (run.config.streams.max_message_mb if run.config else 64) << 20
    letters: list[Letter] = []
    async for record in history.scan(StreamName.DEAD, Selection(), newest_first=True):
        if isinstance(record, Garbled):
            letters.append(unreadable_letter(record))
        elif isinstance(record.message, DeadLetter):
            letters.append(decode_letter(record.entry_id, record.message, max_bytes))
        if len(letters) >= MAX_LETTERS:
            break
    return letters


def _has(letter: Letter, needle: str) -> bool:
    content = letter.content
    return needle.casefold() in f"{content.error}\n{content.worker}\n{content.origin}".casefold()
