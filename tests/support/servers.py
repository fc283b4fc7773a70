"""Servers as processes; Redis with the settings of a deployment: ACL users, TLS, replicas and Sentinels."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from tests.support.waiting import PATIENCE_S
from tidemill.common.redis.embedded import available_servers

REPO = Path(__file__).resolve().parent.parent.parent
INFRA = REPO / "infra" / "redis"
START_TIMEOUT_S = 30.0
STARTS = 5


def newest_server() -> str:
    """The redis-server of the highest version, or an empty text."""
    redis = (path for name, path in available_servers().items() if "valkey" not in name)
    return max(redis, key=server_version, default="")


def server_version(executable: str) -> tuple[int, int]:
    """Major and minor version of an executable."""
    said = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"v=(\d+)\.(\d+)", said)
    assert match is not None, said
    return int(match[1]), int(match[2])


class RedisServer:
    """A server on a loopback port of its own, with `infra/redis/redis.conf` and what a test adds to it."""

    def __init__(self, folder: Path, *options: str, sentinel: bool = False) -> None:
        self.folder = folder
        self.options = list(options)
        self.is_sentinel = sentinel
        self.executable = newest_server()
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.log.exists():
            print(f"--- {self.log}\n{self.log.read_text(errors='replace')[-3000:]}")
        self.kill()

    @property
    def log(self) -> Path:
        return self.folder / "redis.log"

    @property
    def url(self) -> str:
        scheme = "rediss" if "--tls-port" in self.options else "redis"
        return f"{scheme}://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        """Start, on the same port as before where there was one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(STARTS):
            port = self.port or free_port()
            self.process = subprocess.Popen(self._command(port), stdin=subprocess.DEVNULL)
            if self._answers(port):
                self.port = port
                return
            self.kill()  # another process has taken the port meanwhile
        raise AssertionError(f"redis-server does not start: {self.log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _command(self, port: int) -> list[str]:
        conf = self.folder / "redis.conf"
        if self.is_sentinel:
            conf.write_text(
                "\n".join(["bind 127.0.0.1", *self.options]) + "\n"
            )  # it writes into its own file
        else:
            lines = (INFRA / "redis.conf").read_text(encoding="utf-8").splitlines()
            is_old = server_version(self.executable) < (7, 0)
            conf.write_text("\n".join(line for line in lines if not (is_old and "maxmemory-clients" in line)))
        command = [self.executable, str(conf), *(["--sentinel"] if self.is_sentinel else [])]
        command += ["--dir", str(self.folder), "--logfile", str(self.log)]
        if "--tls-port" in self.options:
            ports = ["--port", "0"]
            self.options[self.options.index("--tls-port") + 1] = str(port)
        else:
            ports = ["--port", str(port)]
        return [*command, *ports, *([] if self.is_sentinel else ["--bind", "127.0.0.1", *self.options])]

    def _answers(self, port: int) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return self.process.poll() is None
            time.sleep(0.02)
        return False


class ServerWithUsers(RedisServer):
    """A server with the users that `infra/redis/make_users.py` makes, and those of these runs."""

    def __init__(self, folder: Path, *options: str, runs: Iterable[str] = ()) -> None:
        self.users = folder / "users"
        command = [sys.executable, str(INFRA / "make_users.py"), str(self.users)]
        command += [word for run in runs for word in ("--run", run)]
        subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        super().__init__(folder / "redis", "--aclfile", str(self.users / "users.acl"), *options)

    def passwords(self, run: str = "passwords") -> dict[str, str]:
        """Passwords of the users of a run, or of those of all runs, as TRAINER_PASSWORD and so on."""
        lines = (self.users / f"{run}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def variables(self, user: str) -> dict[str, str]:
        """The environment of a process of a user, or of one of a run: `RUN_ID.trainer`."""
        run, _, role = user.rpartition(".")
        password = self.passwords(run or "passwords")[f"{role.upper()}_PASSWORD"]
        names = ("TIDEMILL_REDIS_URL", "TIDEMILL_REDIS_USERNAME", "TIDEMILL_REDIS_PASSWORD")
        return dict(zip(names, (self.url, user, password), strict=True))

    def client_of(self, user: str) -> redis.Redis:
        options: dict[str, Any] = {"password": self.variables(user)["TIDEMILL_REDIS_PASSWORD"]}
        if "--tls-port" in self.options:
            certificate = self.options[self.options.index("--tls-ca-cert-file") + 1]
            options |= {"ssl": True, "ssl_ca_certs": certificate}
        return redis.Redis("127.0.0.1", self.port, username=user, protocol=2, **options)

    def refusals(self) -> list[tuple[str, str]]:
        """User and object of each refused command, from the server's log."""
        return [(entry["username"], entry["object"]) for entry in self.client_of("admin").acl_log()]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def listening(command: Sequence[Any], port: int, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that serves at a port, from when it answers there to the end of the block."""
    process = subprocess.Popen(command, **options)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def has_tls() -> bool:
    """Whether the newest server was built with TLS, and a certificate can be made."""
    if not newest_server() or shutil.which("openssl") is None:
        return False
    tried = subprocess.run(
        [newest_server(), "--tls-port", "0", "--tls-replication", "yes", "--port", "x"],
        capture_output=True,
        text=True,
    )
    # One with TLS stumbles over the port, one without over the first option of TLS.
    return "tls-port" not in tried.stdout + tried.stderr


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate = folder / "redis.crt"
    key = folder / "redis.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=tidemill-test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def tls_options(certificate: Path, key: Path) -> list[str]:
    """Options of a server that speaks TLS only."""
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
    return ["--tls-port", "0", *map(str, files), "--tls-auth-clients", "no"]


def command_lines(pids: list[int]) -> str:
    """What `ps` shows of processes."""
    return "\n".join(
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for pid in pids
        if os.path.exists(f"/proc/{pid}/cmdline")
    )


class SentinelPair:
    """A master, its replica, and one Sentinel that watches both."""

    def __init__(self, folder: Path, down_after_ms: int = 500) -> None:
        without_delay = ("--repl-diskless-sync-delay", "0")
        self.master = RedisServer(folder / "master", *without_delay)
        self.replica = RedisServer(folder / "replica", *without_delay)
        self.sentinel = RedisServer(folder / "sentinel", sentinel=True)
        self.down_after_ms = down_after_ms

    def __enter__(self) -> "SentinelPair":
        self.master.start()
        self.replica.options += ["--replicaof", "127.0.0.1", str(self.master.port)]
        self.replica.start()
        self.sentinel.options += [
            f"sentinel monitor mymaster 127.0.0.1 {self.master.port} 1",
            f"sentinel down-after-milliseconds mymaster {self.down_after_ms}",
            "sentinel failover-timeout mymaster 5000",
        ]
        self.sentinel.start()
        self._wait(self.is_replicated)
        self._wait(lambda: self.sentinel.client.sentinel_master("mymaster")["num-slaves"] == 1)
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.kill()

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/mymaster"

    def fails_over(self) -> bool:
        """Ask the sentinel to make the replica the master; False while it knows no replica that is fit."""
        try:
            self.sentinel.client.execute_command("SENTINEL", "FAILOVER", "mymaster")
        except redis.ResponseError:
            return False
        return True

    def is_replicated(self) -> bool:
        """Whether the replica has all that the master has."""
        ours = self.master.client.info("replication")
        theirs = self.replica.client.info("replication")
        is_up = theirs.get("master_link_status") == "up"
        return is_up and ours["master_repl_offset"] == theirs["slave_repl_offset"]

    def _wait(self, predicate: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not predicate():
            assert time.monotonic() < deadline, "the replica does not follow its master"
            time.sleep(0.05)
