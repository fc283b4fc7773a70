"""What people do beside a run: look at it, put dead letters back, start a second trainer."""

import argparse
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.fleet import Fleet, serve_as
from tests.simulation.process import Process
from tests.simulation.world import World
from tidemill.common.errors import TidemillError, first_cause
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FINISHED, read_config
from tidemill.common.streams import Entry, read_range
from tidemill.common.wire.messages import DeadLetter
from tidemill.services.console.look.dead_letters import Requeuer, decode_dead
from tidemill.services.console.look.snapshot import SnapshotReader


class Status(SnapshotReader):
    """Reads what `tidemill status` reads, except RQ's queues, which are not simulated."""

    async def _jobs(self) -> dict[str, dict[str, int]]:
        return {}


def operate(world: World, fleet: Fleet) -> None:
    """`tidemill status`, then `tidemill dead requeue --all`."""

    async def main() -> int:
        broker = await Broker.connect("redis://simulated")
        try:
            reader = await Status.attach(broker, world.run_id)
            await reader.read()
            config = await read_config(broker, world.keys)
            requeuer = await Requeuer.open(broker, world.keys, config, world.folder / world.run_id)
            for entry in await read_range(broker, world.keys.dead, DeadLetter):
                if isinstance(entry, Entry):
                    await requeuer.put_back(decode_dead(entry, config.streams.max_message_mb << 20))
        finally:
            await broker.close()
        return 0

    _start(world, fleet, "operator", "operator", main)


def start_second_trainer(world: World, fleet: Fleet) -> None:
    """Start a second trainer in the folder of a living one: it reports that, and ends."""
    options = argparse.Namespace(run=world.run_id, name="second", metrics_port=0, set=[], config=None)

    async def main() -> int:
        return await serve_as("trainer", options)

    _start(world, fleet, "second", "trainer", main)


def _start(
    world: World, fleet: Fleet, name: str, role: str, main: Callable[[], Coroutine[Any, Any, int]]
) -> None:
    def ended(process: Process, code: int, error: BaseException | None) -> None:
        cause = first_cause(error) if error is not None else None
        if cause is not None and not isinstance(cause, TidemillError):
            fleet.crashes.append(f"{name}: {cause!r} {cause}")
        if code == 0 and role == "trainer" and fleet.is_finished:
            fleet.outcome = fleet.outcome or FINISHED
        world.tell(name, f"ended {code} {cause!r}")

    world.start(name, role, main, ended)
