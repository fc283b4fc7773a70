"""HTTP routes: vLLM's /classify, /pooling, /tokenize, /health and /v1/models, /metrics, and /v1/completions
for logprobs of a language model.

A request is answered in full or refused with a reason: a full queue is 429 with Retry-After, what can never
work is 400. After SIGTERM no new request is taken, what was accepted is finished within `--drain-s`, and the
exit code is 0. If computing stops because of an unexpected error, the process ends with 1.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidemill.common.process.gpu_sharing import GpuGate, GpuLock, lock_files
from tidemill.common.process.http_server import BACKLOG, ServerInService, listen, server_config
from tidemill.common.process.json_api import InputError, TokenGate, answered, read_body
from tidemill.common.process.programs import run_main
from tidemill.common.process.replicas import LANE_HEADER
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.model_server.batcher import Batcher
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.requests import (
    ClassifyRequest,
    Inputs,
    LogprobsRequest,
    TokenizeRequest,
    answer,
    completion,
)
from tidemill.services.reward.model_server.scoring_model import ScoringModel, activate
from tidemill.services.reward.remote.tokens import MODEL_TOKEN_VARIABLE, model_token

log = structlog.get_logger(__name__)


def run_server(options: ServerOptions, template: str | None) -> int:
    """Load the model and serve it; returns the exit code.

    Raises:
        ConfigError: model or port cannot be used.
    """
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    # Before the model loads: a port in use is reported at once.
    with listen(options.host, options.port) as listener:
        model = ScoringModel(options)
        inputs = Inputs(options.model, model.vocab_size, model.max_model_len, template)
        return run_main(_serve(options, model, inputs, listener))


async def _serve(options: ServerOptions, model: ScoringModel, inputs: Inputs, listener: socket.socket) -> int:
    batcher = Batcher(model, options)
    gate = None
    if options.share_device:
        gate = GpuGate(
            GpuLock(lock_files()),
            wake=lambda: batcher.alone(model.restore),
            sleep=lambda: batcher.alone(model.offload),
            turn_s=options.turn_s,
        )
    app = ScoringApp(options.served_model_name or options.model, model, inputs, batcher, gate)
    server = ServerInService(  # there is more to end than HTTP
        server_config(
            Starlette(
                routes=list(app.routes()),
                middleware=[Middleware(TokenGate, model_token(), MODEL_TOKEN_VARIABLE)],
            ),
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
        )
    )
    running = [batcher.start()] + ([gate.start()] if gate else [])
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    host, port = listener.getsockname()[:2]
    log.info(
        "serving", model=options.model, kind=model.kind, device=str(model.device), url=f"http://{host}:{port}"
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait({serving, *running}, return_when=asyncio.FIRST_COMPLETED)
    died = [repr(task.exception()) for task in running if task.done()]
    if died:
        log.error("computing stopped", error=died[0])
        server.should_exit = True
        server.force_exit = True
    await serving  # it finishes what it has accepted
    await batcher.close()
    if gate is not None:
        await gate.close()
    return 1 if died else 0


URGENT = -1
DOES = {
    "sequence": "scores sequences; ask /classify for them",
    "token": "scores tokens; ask /pooling for them",
    "lm": "gives logprobs of tokens; ask /v1/completions for them",
}


class ScoringApp:
    def __init__(
        self, name: str, model: ScoringModel, inputs: Inputs, batcher: Batcher, gate: GpuGate | None
    ) -> None:
        self.name = name
        self.model = model
        self.inputs = inputs
        self.batcher = batcher
        self.gate = gate

    def routes(self) -> list[Route]:
        worked_on = {
            "/classify": self._classify,
            "/pooling": self._pool,
            "/v1/completions": self._prompt_logprobs,
            "/tokenize": self._tokenize,
        }
        return [
            *(Route(path, partial(_answered, work), methods=["POST"]) for path, work in worked_on.items()),
            Route("/health", self.health),
            Route("/healthz", self.health),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
        ]

    async def health(self, _: Request) -> Response:
        return Response()

    async def models(self, _: Request) -> Response:
        card = {
            "id": self.name,
            "object": "model",
            "owned_by": "tidemill",
            "max_model_len": self.inputs.max_len,
            "kind": self.model.kind,
            "num_labels": self.model.num_labels,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _classify(self, http: Request) -> dict[str, Any]:
        if self.model.kind != "sequence":
            raise InputError(f"this model {DOES[self.model.kind]}")
        request, scores, num_tokens = await self._scored(http)
        data = [  # `probs` are raw scores where no activation was wanted
            {
                "index": index,
                "label": self.model.labels.get(max(range(len(row)), key=row.__getitem__)),
                "probs": row,
                "num_classes": len(row),
            }
            for index, row in enumerate(scores)
        ]
        return answer("classify", self.name, num_tokens, request.request_id, data=data)

    async def _pool(self, http: Request) -> dict[str, Any]:
        """Scores of sequences, or of every token, whichever the model has."""
        if self.model.kind == "lm":
            raise InputError(f"this model {DOES[self.model.kind]}")
        request, scores, num_tokens = await self._scored(http)
        data = [{"index": index, "object": "pooling", "data": row} for index, row in enumerate(scores)]
        return answer("pooling", self.name, num_tokens, request.request_id, data=data)

    async def _prompt_logprobs(self, http: Request) -> dict[str, Any]:
        if self.model.kind != "lm":
            raise InputError(f"this model {DOES[self.model.kind]}; start the server with --head lm")
        request = LogprobsRequest.model_validate_json(await read_body(http))
        self._check_name(request.model)
        rows = self.inputs.checked(request.rows)
        computed = await self._computed(rows, http, request.priority)
        return completion(self.name, rows, [logprobs.tolist() for logprobs in computed])

    async def _tokenize(self, http: Request) -> dict[str, Any]:
        request = TokenizeRequest.model_validate_json(await read_body(http))
        self._check_name(request.model)
        # On a thread, here and below: a long text takes a while, and others are answered meanwhile.
        (ids,) = await asyncio.to_thread(self.inputs.rows, request)
        return {"count": len(ids), "max_model_len": self.inputs.max_len, "tokens": ids}

    async def _scored(self, http: Request) -> tuple[ClassifyRequest, list[Any], int]:
        """The request, the scores of each of its inputs, and its tokens."""
        request = ClassifyRequest.model_validate_json(await read_body(http))
        self._check_name(request.model)
        wanted = "token_classify" if self.model.kind == "token" else "classify"
        if request.task not in (None, wanted):
            raise InputError(f"task {request.task!r} is not what this model does; it does {wanted!r}")
        rows = await asyncio.to_thread(self.inputs.rows, request)
        scores = await self._computed(rows, http, request.priority)
        if request.use_activation is not False:
            scores = [activate(score, self.model.config) for score in scores]
        return request, [score.tolist() for score in scores], sum(map(len, rows))

    def _check_name(self, model: str | None) -> None:
        path = self.model.path
        # Clients of several servers name the model by its folder, whatever this server calls it.
        if model and model not in (self.name, path, Path(path).name):
            raise InputError(f"this server has the model {self.name!r}, not {model!r}")

    async def _computed(self, rows: list[list[int]], http: Request, priority: int) -> list[Any]:
        """Results of the rows. A request of evaluation gets priority `URGENT`, whatever it asked for."""
        is_urgent = http.headers.get(LANE_HEADER) == Lane.EVAL.value
        async with self.gate.use() if self.gate is not None else contextlib.nullcontext():
            return await self.batcher.score(rows, URGENT if is_urgent else priority)


async def _answered(work: Callable[[Request], Awaitable[dict[str, Any]]], http: Request) -> Response:
    response = await answered(work, http)
    metrics.REWARD_MODEL_REQUESTS.labels(http.url.path, response.status_code).inc()
    return response
