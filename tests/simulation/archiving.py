"""The process that writes the archive, where the trainer starts one of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.simulation.loop import OWNER
from tests.simulation.process import Process
from tests.simulation.world import World
from tidemill.common.archive.__main__ import archive
from tidemill.common.errors import TidemillError
from tidemill.common.process.programs import Program
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire.keys import Keys


class Child:
    """What `asyncio.create_subprocess_exec` returns of a simulated process."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        self.returncode = code  # type: ignore[assignment]
        self._ended.set()


def spawn(world: World) -> Callable[..., Awaitable[Child]]:
    """In place of `asyncio.create_subprocess_exec`: understands the archiver's command line."""

    async def start(*command: str, **_: Any) -> Child:
        words = list(command)
        index = words.index(Program.ARCHIVE)
        run_id, run_dir, *options = words[index + 1 :]
        until = dict(item.split("=", 1) for item in options if "=" in item)
        child = Child()
        parent = OWNER.get(world.loop.world)

        async def main() -> int:
            try:
                ends = {StreamName(name): last for name, last in until.items()}
                await archive(Keys(run_id), Path(run_dir), ends, "--rest" in options)
                return 0
            except TidemillError as error:
                return error.exit_code

        def ended(process: Process, code: int, error: BaseException | None) -> None:
            if error is not None:
                world.tell(process.name, f"ends with {type(error).__name__}: {error}")
            if not parent.is_dead:
                child.end(code)

        process = world.start("archiver", "archiver", main, ended)
        child.pid = process.pid
        return child

    return start
