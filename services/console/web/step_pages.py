"""The list of steps, and one step."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from common.errors import TidemillError
from common.messages import Commit
from services.console.web.group_view import read_commit
from services.console.web.site import Site, history_of
from services.console.web.step_view import sort_metrics, view_step

PAGE_STEPS = 200
MAX_DROPPED = 500


class StepPages:
    """Handlers of `/run/.../steps`."""

    def __init__(self, site: Site) -> None:
        self.site = site

    @property
    def routes(self) -> list[BaseRoute]:
        """Their addresses."""
        return [Route("/run/{run}/steps", self.steps), Route("/run/{run}/steps/{step:int}", self.step)]

    async def steps(self, request: Request) -> Response:
        """All steps, the newest first, a page at a time."""
        run = await self.site.run_of(request)
        numbers = sorted(run.index.steps, reverse=True)
        typed = request.query_params.get("page", "1")
        num_pages = max(1, -(-len(numbers) // PAGE_STEPS))
        page = (
            min(max(1, int(typed)), num_pages)
            if typed.isascii() and typed.isdigit() and len(typed) < 9
            else 1
        )
        shown = numbers[(page - 1) * PAGE_STEPS : page * PAGE_STEPS]
        rows = [run.index.steps[number] for number in shown]
        return self.site.page("steps.html", run, "steps", rows=rows, page=page, num_pages=num_pages)

    async def step(self, request: Request) -> Response:
        """One step: what went in, in which micro-batches, where the time went, what came out."""
        run = await self.site.run_of(request)
        number = request.path_params["step"]
        row = run.index.steps.get(number)
        if row is None:
            raise HTTPException(404, f"Step {number} has no commit yet.")
        problem = ""
        commit: Commit | None = None
        try:
            commit = await read_commit(history_of(run), number)
        except TidemillError as error:
            problem = str(error)
        view = view_step(commit, run.index) if commit else None
        return self.site.page(
            "step.html",
            run,
            "steps",
            row=row,
            view=view,
            topics=view.topics if view else sort_metrics(row.metrics),
            problem=problem,
            most_dropped=MAX_DROPPED,
            previous=number - 1 if number - 1 in run.index.steps else None,
            following=number + 1 if number + 1 in run.index.steps else None,
        )
