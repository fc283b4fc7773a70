"""The list of runs, and the overview of one."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from common.messages import Lane
from services.console.web.charts import chart_trees
from services.console.web.group_row import STATES
from services.console.web.site import Site
from services.console.web.watched_run import WatchedRun

QUEUE_WORDS = {
    "prompts": ("Prompts", "groups to generate"),
    "trajectories": ("Trajectories", "completions to score"),
    "scores": ("Scores", ""),
    "prompts:eval": ("Prompts, evaluation", "groups to generate"),
    "trajectories:eval": ("Trajectories, evaluation", "completions to score"),
}
RECENT_STEPS = 5


class RunPages:
    """Handlers of `/` and `/run/...`."""

    def __init__(self, site: Site) -> None:
        self.site = site

    @property
    def routes(self) -> list[BaseRoute]:
        """Their addresses."""
        return [
            Route("/", self.runs),
            Route("/run/{run}", self.overview),
            Route("/run/{run}/", self.without_slash),
            Route("/run/{run}/state.html", self.state),
            Route("/run/{run}/charts.json", self.charts),
            Route("/run/{run}/news.json", self.news),
        ]

    async def runs(self, request: Request) -> Response:
        """All runs."""
        lines = await self.site.catalog.lines()
        return self.site.templates.response(
            "runs.html", run=None, here="runs", lines=lines, folder=str(self.site.catalog.runs)
        )

    async def without_slash(self, request: Request) -> Response:
        """People type one."""
        return RedirectResponse(request.url.path.rstrip("/"), 301)

    async def overview(self, request: Request) -> Response:
        """A run: its state and its curves."""
        run = await self.site.run_of(request)
        return self.site.page("overview.html", run, "overview", **_state(run))

    async def state(self, request: Request) -> Response:
        """The part of the overview that changes all the time."""
        run = await self.site.run_of(request)
        return self.site.page("state.html", run, "overview", **_state(run))

    async def charts(self, request: Request) -> Response:
        """The curves' points."""
        run = await self.site.run_of(request)
        evaluations = run.snapshot.evaluations if run.snapshot else []
        return JSONResponse(
            {
                "live": run.is_live,
                "version": run.snapshot.version if run.snapshot else 0,
                "charts": chart_trees(run.index.steps, evaluations),
            }
        )

    async def news(self, request: Request) -> Response:
        """Whether anything has changed, for pages that only say so."""
        run = await self.site.run_of(request)
        return JSONResponse(
            {
                "live": run.is_live or not run.index.is_complete,
                "groups": {lane.value: len(run.index.groups[lane]) for lane in Lane},
                "steps": len(run.index.steps),
            }
        )


def _state(run: WatchedRun) -> dict[str, Any]:
    counts = dict.fromkeys(STATES, 0)
    for row in run.index.rows(Lane.TRAIN):
        counts[row.state] += 1
    steps = run.index.steps
    return {
        "snapshot": run.snapshot,
        "queue_words": QUEUE_WORDS,
        "counts": counts,
        "num_eval": len(run.index.groups[Lane.EVAL]),
        "recent": [steps[step] for step in sorted(steps)[-RECENT_STEPS:][::-1]],
    }
