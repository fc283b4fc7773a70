"""`tidemill serve-rewards`: an HTTP endpoint for samples, which a run of reward workers scores.

    POST /v1/scores   {"samples": [{"completion": ..., ...}, ...]} -> {"scores": [{"value": ..., ...}, ...]}
    GET /health, /openapi.json

A request is answered when its last sample is scored, or refused as a whole. What was not answered may be sent
again: it is scored as new samples.
"""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from rich.console import Console
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidemill.common.config import RunConfig, load_config
from tidemill.common.errors import ConfigError
from tidemill.common.process.gpus import count_gpus
from tidemill.common.process.http_server import ServerInService, listen, server_config
from tidemill.common.process.json_api import TokenGate, answered, token_problem
from tidemill.common.process.programs import run_main
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.services.console.check.placement import gpus_here, place
from tidemill.services.console.commands import ServeRewardsOptions
from tidemill.services.console.run.folder import RunFolder, folder_of_runs, log_to_file, nearest, new_run_id
from tidemill.services.console.serve.gateway import RewardGateway, ScoreOut
from tidemill.services.console.serve.intake import RequestReader
from tidemill.services.console.serve.samples import ScoringRequest
from tidemill.services.console.up.reward_run import RewardRun

log = structlog.get_logger(__name__)

TOKEN_VARIABLE = "TIDEMILL_REWARDS_TOKEN"  # the variable's name, not a token
PATH = "/v1/scores"
WRITTEN_AT_ONCE = 512
"""Most scores of an answer that are written without a turn of other requests."""
UNUSED: dict[str, Any] = {
    "model": {"path": "unused"},
    "rollout": {"engine": "simulated", "workers": 0},
    "trainer": {"policy": "simulated"},
}
"""Sections that only our own trainer and engines read."""


class ScoringAnswer(BaseModel):
    """Their scores, in the order of the samples."""

    scores: list[ScoreOut]


def serve_rewards(options: ServeRewardsOptions) -> None:
    token = os.environ.get(TOKEN_VARIABLE, "")
    problem = token_problem(options.host, token, TOKEN_VARIABLE, "the trainer")
    if problem:
        raise ConfigError(problem)
    run_main(_serve(options, _config(options), token))


def _config(options: ServeRewardsOptions) -> RunConfig:
    config = load_config(
        options.config, options.overrides, lambda tree: {"data": {"train": "unused"}} | tree | UNUSED
    )
    if config.reward.teachers:
        raise ConfigError(
            f"reward.rewards: {', '.join(config.reward.teachers)} is a teacher, whose logprobs only our own "
            "trainer can use; leave it out"
        )
    if config.images is not None and importlib.util.find_spec("PIL") is None:
        raise ConfigError("images needs the package pillow, which is not installed: pip install pillow")
    reward = config.reward.model_copy(update={"workers": max(1, config.reward.workers)})
    run_id = options.run_id or config.run_id or new_run_id(options.config, "rewards")
    return place(config.model_copy(update={"reward": reward, "run_id": run_id}), gpus_here(count_gpus()))[0]


async def _serve(options: ServeRewardsOptions, config: RunConfig, token: str) -> None:
    console = Console(highlight=False)
    listener = listen(options.host, options.port)
    folder = RunFolder(folder_of_runs(options.runs_dir), config.run_id)
    run = RewardRun(
        config,
        folder,
        os.environ.get(URL_VARIABLE),
        lambda text: console.print(text, style="yellow", markup=False, soft_wrap=True),
        is_sandbox=False,
    )
    async with run.running(kind="serve-rewards") as broker:
        log_to_file(folder.logs / "console.log")
        broker.max_bytes = config.streams.max_message_mb << 20
        gateway = await RewardGateway.open(run, broker)
        reader = RequestReader(config.images, folder.path, config.streams.claim_check_url)
        server = ServerInService(
            server_config(
                application(gateway, reader, token),
                timeout_graceful_shutdown=max(1, round(config.streams.drain_s)),
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        host, port = listener.getsockname()[:2]
        console.print(f"run {config.run_id}  in {nearest(folder.path)}", markup=False, soft_wrap=True)
        where = f"[{host}]" if ":" in host else host
        console.print(f"scores at http://{where}:{port}{PATH}; Ctrl-C ends it", markup=False, soft_wrap=True)
        keeping = asyncio.create_task(gateway.run(), name="gateway")
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()  # it only ends with an error
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await reader.close()


def application(gateway: RewardGateway, reader: RequestReader, token: str) -> Starlette:
    async def score(http: Request) -> Response:
        with gateway.registered() as waiting:
            async with reader.request_of(http, gateway.check_room) as request:
                num_bytes = request.num_bytes
                await gateway.submit(request, waiting)
            # Outside: the next large request is read while these wait for their scores.
            scores = await gateway.scores_of(waiting, num_bytes)
        return Response(await _json_of(scores), media_type="application/json")

    async def health(_: Request) -> Response:
        return Response()

    async def described(_: Request) -> Response:
        return JSONResponse(openapi())

    return Starlette(
        routes=[
            Route(PATH, partial(answered, score), methods=["POST"]),
            Route("/health", health),
            Route("/openapi.json", described),
        ],
        middleware=[Middleware(TokenGate, token, TOKEN_VARIABLE)],
    )


async def _json_of(scores: Sequence[ScoreOut]) -> str:
    """The answer, made in parts: other requests are answered meanwhile."""
    parts = []
    for begin in range(0, len(scores), WRITTEN_AT_ONCE):
        batch = scores[begin : begin + WRITTEN_AT_ONCE]
        # Pydantic writes numbers that are not finite as null.
        parts.append(",".join(score.model_dump_json() for score in batch))
        await asyncio.sleep(0)
    return f'{{"scores":[{",".join(parts)}]}}'


def openapi() -> dict[str, Any]:
    """The endpoint as OpenAPI 3.1 describes it."""
    refs, schemas = models_json_schema(
        [(ScoringRequest, "validation"), (ScoringAnswer, "serialization")],
        ref_template="#/components/schemas/{model}",
    )
    contents = [{"application/json": {"schema": ref}} for ref in refs.values()]
    refused = {"description": "refused, with the reason in error.message"}
    post = {
        "summary": "Score samples; answers when all of them have a score.",
        "requestBody": {"required": True, "content": contents[0]},
        "responses": {
            "200": {"description": "a score for each sample, in their order", "content": contents[1]},
            **dict.fromkeys(("400", "401", "413", "429", "503"), refused),
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tidemill: rewards", "version": "1"},
        "paths": {PATH: {"post": post}},
        "components": {"schemas": schemas["$defs"]},
    }
