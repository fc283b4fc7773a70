"""What all pages share: finding the run that an address names, and filling a template for it."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import BrokerError
from common.history import History
from services.console.web.catalog import Catalog
from services.console.web.templating import Templates
from services.console.web.watched_run import WatchedRun


class Site:
    """The catalog of runs, and the templates."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.templates = Templates()

    async def run_of(self, request: Request) -> WatchedRun:
        """The run of an address.

        Raises:
            HTTPException: there is no such run.
        """
        run = await self.catalog.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, f"There is no run of this name in {self.catalog.runs}.")
        return run

    def page(self, template: str, run: WatchedRun, here: str, **values: Any) -> Response:
        """A page about a run; `here` names its place in the menu."""
        return self.templates.response(template, run=run, here=here, **values)


def history_of(run: WatchedRun) -> History:
    """What can be read of the run.

    Raises:
        BrokerError: nothing can, at this moment.
    """
    if run.history is None:
        raise BrokerError(run.problem or "The run's streams are being opened; load the page again.")
    return run.history
