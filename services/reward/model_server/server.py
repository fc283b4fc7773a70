"""Wires model, batches and HTTP together, and ends them in order.

SIGTERM: no new request is taken, what was accepted is finished within `--drain-s`, exit code 0. The
process also ends when computing stops for a reason nobody expected, so that whoever supervises it notices.
"""

import asyncio
import signal
import socket

import structlog
import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware

from tidemill.common.errors import ConfigError
from tidemill.common.process.gpu_sharing import GpuGate, GpuLock, lock_files
from tidemill.common.process.http_server import BACKLOG, ServerInService, listen, server_config
from tidemill.common.process.programs import run_main
from tidemill.services.reward.model_server.app import ScoringApp, TokenGate
from tidemill.services.reward.model_server.batcher import Batcher, BatchLimits
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.requests import Inputs
from tidemill.services.reward.model_server.scoring_model import ScoringModel
from tidemill.services.reward.remote.tokens import model_token

log = structlog.get_logger(__name__)


def run_server(options: ServerOptions, template: str | None) -> int:
    """Load the model and serve it; returns the exit code.

    Raises:
        ConfigError: model or port cannot be used.
    """
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    try:
        listener = listen(options.host, options.port)  # before the model loads: a port in use is said at once
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}. Give another --port, or 0."
        ) from None
    with listener:
        model = ScoringModel(
            options.model,
            head=options.head,
            dtype=options.dtype,
            device=options.device,
            is_offloaded=options.share_device,
            max_model_len=options.max_model_len,
        )
        inputs = Inputs(options.model, model.vocab_size, model.max_model_len, template)
        return run_main(_serve(options, model, inputs, listener))


async def _serve(options: ServerOptions, model: ScoringModel, inputs: Inputs, listener: socket.socket) -> int:
    limits = BatchLimits(options.max_batch_tokens, options.max_batch_rows, options.max_padding)
    batcher = Batcher(model, limits, flush_s=options.flush_ms / 1e3, max_queued_rows=options.max_queued_rows)
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
            Starlette(routes=list(app.routes()), middleware=[Middleware(TokenGate, model_token())]),
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
        server.should_exit = server.force_exit = True
    await serving  # which has finished what it accepted
    await batcher.close()
    if gate is not None:
        await gate.close()
    return 1 if died else 0
