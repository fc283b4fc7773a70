"""A Redis that can lose what it has not made durable: its last writes, or those its replica has not seen.

Services know one address, a link to the socket of the server that is in charge, as they would know the name
of a service or an address that moves. A server that was killed loses nothing that it has answered, since the
kernel keeps what was written to the append-only file; so the end of that file is cut off, at any byte of what
came within the last fsync window, as a machine that loses power would.
"""

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis

from tests.support.servers import free_port
from tests.support.waiting import wait_until
from tidemill.common.files import LockedError, locked
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis

FSYNC_WINDOW_S = 1.0
"""`appendfsync everysec`: what is older than this is on the disk."""
SAMPLE_S = 0.05
LINK_TIMEOUT_S = 60.0


async def _start(server: EmbeddedRedis) -> None:
    """Start a server again; a child of the killed one that rewrote its file may outlive it for a moment."""
    await wait_until(lambda: _is_free(server.data_dir), LINK_TIMEOUT_S)
    await asyncio.to_thread(server.start)


def _is_free(data_dir: Path) -> bool:
    try:
        with locked(data_dir / "server.lock", "in use"):
            return True
    except LockedError:
        return False


class MortalRedis:
    """The server in charge, at an address that stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home = Path(tempfile.mkdtemp(prefix="tidemill-chaos-"))
        self._generation = 0
        self._sizes: deque[tuple[float, Path, int]] = deque()
        """When the append-only file had which size, over the last window."""
        self._sampler: asyncio.Task[None] | None = None
        self.server, self.port = self._next_server()
        self._before: Path | None = None
        """The data of the server that died last, as they were before any were lost."""
        self._replica: EmbeddedRedis | None = None
        """A server that is about to take over."""

    @property
    def url(self) -> str:
        """The address of whichever server is in charge."""
        return f"unix://{self._address}"

    async def start(self) -> None:
        """Start it, and watch its append-only file grow."""
        await asyncio.to_thread(self.server.start)
        self._take_charge()
        self._sampler = asyncio.create_task(self._sample(), name="sampler of the append-only file")

    async def stop(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
            await asyncio.gather(self._sampler, return_exceptions=True)
        await asyncio.to_thread(self.server.stop)
        if self._replica is not None:
            await asyncio.to_thread(self._replica.stop)
        shutil.rmtree(self._home, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL; what it has answered is in its file."""
        self.server.kill()

    async def restart(self) -> None:
        """Come back with what the append-only file holds."""
        await _start(self.server)

    def lose_tail(self, rng: random.Random) -> int:
        """Cut the file of a killed server within its last window; returns how many bytes went."""
        self._before = self.folder / f"before-{time.monotonic_ns()}"
        shutil.copytree(self.server.data_dir, self._before)
        path = append_only_file(self.server.data_dir)
        size = path.stat().st_size
        durable = next((known_size for _, of, known_size in self._sizes if of == path), size)
        kept = rng.randint(durable, size) if durable < size else size
        os.truncate(path, kept)
        self._sizes.clear()
        return size - kept

    async def fail_over(self, lag_s: float) -> float:
        """Promote a replica that has not seen the master's last `lag_s`; returns when the master died."""
        replica, port = self._next_server("--replicaof", "127.0.0.1", str(self.port))
        self._replica = replica
        await asyncio.to_thread(replica.start)
        client = redis.Redis(unix_socket_path=str(replica.socket))
        await wait_until(lambda: self._follows(client), LINK_TIMEOUT_S)
        client.execute_command("REPLICAOF", "NO", "ONE")
        replica.options = network_of(port)  # when it comes back, it follows nobody
        client.close()
        await asyncio.sleep(lag_s)
        master = self.server
        self.server = replica
        self._replica = None
        self.port = port
        master.kill()
        died_at = time.time()
        self._take_charge()
        await asyncio.to_thread(master.stop)
        self._before = master.data_dir
        return died_at

    @asynccontextmanager
    async def before_the_loss(self) -> AsyncIterator[Broker]:
        """The server as it was when it died: what it had answered is in its file, whatever was lost then."""
        assert self._before is not None, "nothing was lost yet"
        server = EmbeddedRedis(self._before)
        await _start(server)
        try:
            broker = await Broker.connect(server.url)
            yield broker
            await broker.close()
        finally:
            server.kill()
            await asyncio.to_thread(server.stop)
            shutil.rmtree(self._before, ignore_errors=True)

    @property
    def _address(self) -> Path:
        return self._home / "redis.sock"

    def _next_server(self, *options: str) -> tuple[EmbeddedRedis, int]:
        self._generation += 1
        port = free_port()  # replication needs one
        data_dir = self.folder / f"server-{self._generation}"
        return EmbeddedRedis(data_dir, options=(*network_of(port), *options)), port

    def _take_charge(self) -> None:
        """From now on the address leads to the present server."""
        link = self._home / "next"
        link.symlink_to(self.server.socket)
        link.replace(self._address)
        self._sizes.clear()

    def _follows(self, replica: redis.Redis) -> bool:
        """Whether the replica has about all that the master has, and a file of its own to come back from."""
        info = replica.info()
        is_rewriting = info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]
        return info.get("master_link_status") == "up" and not is_rewriting

    async def _sample(self) -> None:
        while True:
            now = time.monotonic()
            if (path := append_only_file(self.server.data_dir)).exists():
                self._sizes.append((now, path, path.stat().st_size))
            while self._sizes and self._sizes[0][0] < now - FSYNC_WINDOW_S:
                self._sizes.popleft()
            await asyncio.sleep(SAMPLE_S)


def network_of(port: int) -> tuple[str, ...]:
    """Options of a server that others can follow."""
    return "--port", str(port), "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"


def append_only_file(data_dir: Path) -> Path:
    """The file that is written now: one of several since Redis 7."""
    parts = sorted((data_dir / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)
    return parts[-1] if parts else data_dir / "appendonly.aof"
