"""A sandbox worker: checks that this machine can run code in a jail, then runs an RQ worker process."""

import asyncio
import json
import os
import signal

from tidemill.common.errors import ConfigError, MachineFaultError, TidemillError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.process.service import ServiceContext
from tidemill.services.reward.sandbox.bubblewrap import SandboxError
from tidemill.services.reward.sandbox.job import probe

WORKING = "work:sandbox"
GRACE_S = 15.0
READ_BYTES = 65_536


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
    reports, writes_to = os.pipe()
    command = run_own(Program.SANDBOX_QUEUE, context.keys.run_id, bounds, str(writes_to))
    try:
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[writes_to])
    finally:
        os.close(writes_to)
    context.activity.enter(WORKING)
    asyncio.get_running_loop().add_reader(reports, _read_shortages, reports, context)
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
        asyncio.get_running_loop().remove_reader(reports)
        os.close(reports)
        if process.returncode is None:
            process.kill()
        stopping.cancel()
        await asyncio.gather(ended, stopping, return_exceptions=True)


def _read_shortages(reports: int, context: ServiceContext) -> None:
    """Put what RQ's worker says about shortages of this machine into the heartbeat."""
    lines = os.read(reports, READ_BYTES).decode(errors="replace").splitlines()
    if not lines:  # its end: the process is gone
        asyncio.get_running_loop().remove_reader(reports)
    for line in lines:
        number, _, reason = line.partition(" ")
        if not reason:
            context.shortage.end()
        elif number.isdigit():
            context.shortage.note(MachineFaultError(reason, int(number)))
