"""`python -m tidemill.services.console.up.node CONFIG --run RUN_ID`: what one node of a run does.

Started on every node, by Slurm, SkyPilot or by hand. Node 0 does `tidemill up` with the run's Redis and
trainer; the others run as many rollout and reward workers as the config says for a machine. They meet in the
run's folder, where node 0 leaves the address of its Redis. Started again, on these nodes or others, the run
goes on.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tidemill.common.config import RunConfig, load_config
from tidemill.common.data.prompt_lengths import with_steps
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.gpus import count_gpus
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import FINISHED, read_state
from tidemill.common.wire.keys import Keys
from tidemill.services.console.check.placement import gpus_here, place
from tidemill.services.console.commands import UpOptions
from tidemill.services.console.run.folder import RunFolder, connected, folder_of_runs
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.run.local_redis import LISTEN_VARIABLE
from tidemill.services.console.up.specs import ServiceSpec, service_environment, service_specs
from tidemill.services.console.up.start import run_up
from tidemill.services.console.up.supervisor import Ending, RunOutcome, Supervisor

NODE_VARIABLES = ("SLURM_PROCID", "SKYPILOT_NODE_RANK")
ROLES = ("rollout", "reward")
POLL_S = 1.0
DRAIN_MARGIN_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Do one node's part of a run.")
    parser.add_argument("config", type=Path, help="the run's YAML file")
    parser.add_argument("--run", required=True, metavar="RUN_ID", help="id of the run")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as of tidemill up")
    node = next((int(os.environ[name]) for name in NODE_VARIABLES if name in os.environ), -1)
    parser.add_argument("--node", type=int, default=node, help="0 has the trainer (default: %(default)s)")
    parser.add_argument("--roles", default=",".join(ROLES), help="of the other nodes (default: %(default)s)")
    options = parser.parse_args()
    hide_memory()
    try:
        folder = RunFolder(folder_of_runs(None), Keys(options.run).run_id)
        if options.node == 0:
            return lead(options.config, options.set, folder)
        unknown = set(options.roles.split(",")) - set(ROLES)
        if unknown:
            raise ConfigError(f"--roles {options.roles}: {unknown.pop()!r} is none of {', '.join(ROLES)}")
        config = with_steps(load_config(options.config, options.set))
        return run_main(follow(config, folder, options.roles.split(",")))
    except TidemillError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return error.exit_code


def lead(config: Path, overrides: list[str], folder: RunFolder) -> int:
    """Node 0: `tidemill up`, whose workers are on the other nodes."""
    if LISTEN_VARIABLE not in os.environ:
        with socket.create_server(("", 0)) as free:
            os.environ[LISTEN_VARIABLE] = f"{socket.gethostname()}:{free.getsockname()[1]}"
    elsewhere = ["rollout.workers=0", "reward.workers=0"]
    # An address that an earlier start has left, on another node perhaps, must not be taken for this one's.
    folder.address_file.unlink(missing_ok=True)
    up = UpOptions(
        config=config,
        overrides=[*overrides, *elsewhere],
        run_id=folder.run_id,
        resume=folder.path.exists(),
        live=False,
        runs_dir=folder.runs,
    )
    return run_up(up)


async def follow(config: RunConfig, folder: RunFolder, roles: list[str]) -> int:
    """Other nodes: run the workers while the run's Redis answers, and again when it has another Redis."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    specs = list(_specs(config.model_copy(update={"run_id": folder.run_id}), roles))
    started_at = time.time()
    while not stopping.is_set() and not _is_summed_up(folder, started_at):
        url = folder.address()
        # The address may be one that a killed node 0 has left behind: so its Redis is asked.
        if url and await _status(url, folder) not in (None, FINISHED):
            outcome = await _serve(url, folder, specs, config, stopping)
            if outcome.ending is Ending.FAILED and await _status(url, folder) is not None:
                print(outcome.reason, file=sys.stderr)
                return outcome.exit_code
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await stopping.wait()
    return 0


async def _serve(
    url: str, folder: RunFolder, specs: list[ServiceSpec], config: RunConfig, stopping: asyncio.Event
) -> RunOutcome:
    """Run the workers with one Redis until its address changes, the run is over, or the node must stop."""
    grace_s = config.streams.drain_s + DRAIN_MARGIN_S
    supervisor = Supervisor(specs, folder.logs, grace_s, lambda text: print(text, flush=True))

    async def watch() -> None:
        while not stopping.is_set() and folder.address() == url and await _status(url, folder) != FINISHED:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await stopping.wait()
        supervisor.stop()

    with Guard() as guard:
        watching = asyncio.create_task(watch(), name="watch")
        try:
            return await supervisor.run(service_environment(url, folder.runs), guard)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def _specs(config: RunConfig, roles: list[str]) -> Iterator[ServiceSpec]:
    """This node's workers, under names of their own."""
    # Where it has GPUs, all of them generate: the trainer's are another node's.
    trainer = config.trainer.model_copy(update={"device": "cpu", "gpus": ()})
    gpus = gpus_here(count_gpus())
    size = config.rollout.vllm.tensor_parallel_size
    num_engines = max(
        config.rollout.workers, len(gpus) // size if config.rollout.engine_traits.loads_model else 0
    )
    rollout = config.rollout.model_copy(update={"workers": max(1, num_engines)})
    reward = config.reward.model_copy(update={"workers": max(1, config.reward.workers)})
    servers = {name: server.model_copy(update={"local": None}) for name, server in config.servers.items()}
    sections = {"trainer": trainer, "rollout": rollout, "reward": reward, "servers": servers}
    placed, _ = place(config.model_copy(update=sections), gpus)
    node = f"{socket.gethostname()}-{os.environ.get('SLURMD_NODENAME', os.getpid())}"
    for spec in service_specs(placed):
        if spec.role in roles:
            name = f"{spec.name}-{node}"
            command = tuple(name if word == spec.name else word for word in spec.command)
            yield replace(spec, name=name, command=command)


def _is_summed_up(folder: RunFolder, since: float) -> bool:
    """Whether the run has finished since then; a run that is given more steps still has its old summary."""
    with suppress(OSError):
        return folder.summary.stat().st_mtime > since
    return False


async def _status(url: str, folder: RunFolder) -> str | None:
    """The run's status, `starting` before there is one; None where its Redis does not answer."""
    try:
        async with connected(url) as broker:
            return str((await read_state(broker, Keys(folder.run_id))).get("status", "starting"))
    except TidemillError:
        return None


if __name__ == "__main__":
    sys.exit(main())
