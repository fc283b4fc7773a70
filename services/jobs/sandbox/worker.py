"""A sandbox worker: checks that this machine can run code in a jail, then runs an RQ worker process."""

import asyncio
import json
import signal

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.process.service import ServiceContext
from tidemill.services.jobs.sandbox.jail import SandboxError
from tidemill.services.jobs.sandbox.job import probe

WORKING = "work:sandbox"
GRACE_S = 15.0


async def serve(context: ServiceContext) -> None:
    """Run jobs until asked to stop; the job under way is finished."""
    configs = [reward.sandbox for reward in context.config.reward.named.values() if reward.sandbox]
    if not configs:
        raise ConfigError(f"run {context.keys.run_id} has no reward of kind sandbox: there is nothing to do")
    for config in configs:
        try:
            await asyncio.to_thread(probe, config)
        except SandboxError as error:
            raise ConfigError(str(error)) from None
    bounds = json.dumps([config.model_dump(mode="json") for config in configs])
    command = run_own(Program.SANDBOX_QUEUE, context.keys.run_id, bounds)
    process = await asyncio.create_subprocess_exec(*command)
    context.activity.enter(WORKING)
    ended = asyncio.ensure_future(process.wait())
    stopping = asyncio.ensure_future(context.stopping.wait())
    try:
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            # A job that is killed after that is queued again by the reward worker that waits for it.
            await asyncio.wait({ended}, timeout=max(config.total_s for config in configs) + GRACE_S)
        elif not context.stopping.is_set():
            raise TidemillError(f"RQ's worker ended with {process.returncode}; see its output above")
    finally:
        if process.returncode is None:
            process.kill()
        stopping.cancel()
        await asyncio.gather(ended, stopping, return_exceptions=True)
