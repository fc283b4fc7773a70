"""Commands to Redis that are repeated while Redis is unavailable.

Every command of a running service goes through `Broker`, which repeats it with backoff and jitter while
Redis is unreachable, loading, failing over or full, logs this, and counts the time as waiting for Redis.
Only the first `connect` fails fast, because then a person is watching. Commands must therefore be safe to
repeat; `tidemill.common.streams` is written for that.
"""

import asyncio
import errno
import hashlib
import os
import random
import re
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from redis import exceptions as redis_errors

from tidemill.common.command_line import command_line
from tidemill.common.errors import BrokerError, OutageError, UnreachableError
from tidemill.common.redis.client import (
    CA_VARIABLE,
    PASSWORD_VARIABLE,
    URL_VARIABLE,
    USERNAME_VARIABLE,
    RoundTrips,
    make_client,
    public_address,
)
from tidemill.common.redis.lines import Client
from tidemill.common.telemetry import metrics

if TYPE_CHECKING:
    from tidemill.common.store import ClaimStore

log = structlog.get_logger(__name__)

WAIT_VARIABLE = "TIDEMILL_REDIS_WAIT_S"

MIN_SERVER = (6, 2)
MAX_BLOCK_S = 5.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 3.0
STOP_PATIENCE_S = 5.0
NO_EVICTION = "noeviction"
REFUSING_SHARE = 0.99
"""Share of maxmemory above which Redis counts as full: it refuses writes that exceed the rest."""

T = TypeVar("T")

_SCRIPTS = resources.files(__package__) / "lua"

_PASSING = (
    redis_errors.ConnectionError,  # and BusyLoadingError
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.OutOfMemoryError,
    redis_errors.TryAgainError,
    redis_errors.ClusterDownError,  # and MasterDownError
    redis_errors.NoScriptError,
    OSError,
)
_DEMOTED = ("READONLY", "MASTERDOWN", "UNBLOCKED")
"""Prefixes of errors of a server that has become a replica: new connections will find its master."""
_PASSING_PREFIXES = ("OOM", "MISCONF", "LOADING", "BUSY ", "NOREPLICAS", *_DEMOTED)
_DISCARDED = "Transaction discarded because of: "
_SCRIPT_ERROR = re.compile(r"Error running script \(call to .*@user_script: ?\d+: -?(.*)", re.DOTALL)
"""Form in which Redis 6.2 wraps the error of a command inside a script; 7.0 returns the error itself."""
_FINAL = (redis_errors.AuthenticationError, redis_errors.AuthorizationError, redis_errors.NoPermissionError)


def redis_url() -> str:
    """The server's address from the environment. Raises BrokerError: it is not set."""
    url = os.environ.get(URL_VARIABLE, "")
    if not url:
        raise no_address()
    return url


def no_address(elsewhere: str = "") -> BrokerError:
    """The error for want of an address. `elsewhere` says where else it was looked for."""
    return BrokerError(
        f"{URL_VARIABLE} is not set{elsewhere}. Give the server's address, such as redis://host:6379/0 "
        "(rediss:// for TLS, redis+sentinel://host:26379/NAME for the master that Sentinels watch, "
        "redis+cluster://host:6379 for a cluster), or start the whole run with "
        f"`{command_line('up', 'CONFIG')}`, which brings its own Redis."
    )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that Redis uses, its limit (0: none), and what it does at the limit.

    Example: `used_bytes` 1 GiB, `max_bytes` 4 GiB, `policy` "noeviction": a share of 0.25.
    """

    used_bytes: int
    max_bytes: int
    policy: str = NO_EVICTION

    @property
    def share(self) -> float:
        """Used share of the limit: 0 to 1, or a little more; 0 where there is no limit."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def is_full(self) -> bool:
        """Whether writes are refused, or are about to be."""
        return self.share >= REFUSING_SHARE


class Broker:
    """Commands on one Redis, repeated until they are answered. Replies are raw (RESP2, bytes)."""

    max_bytes: int | None = None
    """The run's limit on the size of a message or payload; None where it is not known."""

    def __init__(self, redis: Client) -> None:
        self.redis = redis
        self.open_claims: Callable[[], ClaimStore] | None = None
        """Opens the store of the payloads that lie beside the streams; None where the run's folder is not
        known. `claims` calls it at its first use: in a trainer, where the first payload is named, for most
        runs have none."""
        self._claims: ClaimStore | None = None
        self._reads_choices = False
        self.waits_for_claims = True
        """Whether to wait while their store is away; commands for people show that as a fault instead."""
        self.waited_s = 0.0
        self.num_interruptions = 0
        """Calls whose first attempt failed. Redis may have done them, with only the answer lost."""
        self.round_trips = RoundTrips()
        self.is_stopping = False
        """Set when the service must stop: it then waits for Redis at most `STOP_PATIENCE_S`."""
        self._may_load = True
        self._flowing: set[str] = set()
        """Streams whose last read returned entries. The next read does not block, and so shares a round trip
        with other commands; only if it returns none, a blocking read follows."""

    @property
    def claims(self) -> "ClaimStore | None":
        """Reads the payloads that lie beside the streams; None where the run's folder is not known."""
        if self._claims is None and self.open_claims is not None:
            self.claims = self.open_claims()
        return self._claims

    @claims.setter
    def claims(self, store: "ClaimStore | None") -> None:
        self._claims = store
        if store is not None and self._reads_choices:
            store.reads_choices = True

    @property
    def has_opened_claims(self) -> bool:
        return self._claims is not None

    def read_choices(self) -> None:
        """Have what the engine chose read with each trajectory."""
        self._reads_choices = True
        if self._claims is not None:
            self._claims.reads_choices = True

    @classmethod
    async def connect(cls, url: str | None = None) -> "Broker":
        """Connect, and check version and settings.

        Fails at once unless TIDEMILL_REDIS_WAIT_S grants an unreachable server some time: a worker that is
        started again during an outage of Redis should wait for it, a person who mistyped should not.

        Raises:
            BrokerError: unreachable, wrong credentials, older than 6.2, or set to evict keys.
            OutageError: unreachable for all of that time.
        """
        url = url or redis_url()
        wait_s = float(os.environ.get(WAIT_VARIABLE, "0"))
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return await cls._connect(url)
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise (OutageError(str(error)) if wait_s else error) from None
                log.warning("waiting for Redis", error=str(error))
                await asyncio.sleep(LONGEST_PAUSE_S * random.random())

    @classmethod
    async def _connect(cls, url: str) -> "Broker":
        broker = cls(make_client(url))
        try:
            _check_server(_parse_info(await broker.redis.execute_command("INFO")), url)
            # Now: a worker that is short of descriptors later has to hand back what it holds.
            _read_scripts()
        except (redis_errors.RedisError, OSError, ValueError, BrokerError) as error:
            await broker.close()
            raise error if isinstance(error, BrokerError) else _explain(error, url) from None
        return broker

    async def execute(self, *command: Any) -> Any:
        """Run one command. A read that blocks (BLOCK) has one stream; its waits for entries do not count as
        waiting for Redis."""
        if "BLOCK" not in command:
            return await self._timed(lambda: self.redis.execute_command(*command))
        # ..., "STREAMS", stream, from which id on
        *_, stream, _ = command
        if stream in self._flowing:
            at = command.index("BLOCK")
            without_block = (*command[:at], *command[at + 2 :])
            reply = await self.execute(*without_block)
            if reply:
                return reply
            self._flowing.discard(stream)
        begun = time.monotonic()
        reply = await self._patiently(lambda: self.redis.execute_command(*command, is_blocking=True))
        if reply:
            self._flowing.add(stream)
            self.round_trips.brought_news(begun)
        return reply

    async def pipeline(self, commands: Sequence[Sequence[Any]], atomic: bool = False) -> list[Any]:
        """Run several commands in one round trip; errors come back as values in the list."""

        async def send() -> list[Any]:
            replies = await self.redis.exchange(commands, atomic)
            for reply in replies:
                # Raised for all of them, which are sent again: each command must be safe to repeat.
                is_ours = isinstance(reply, Exception) and _is_passing(reply)
                if is_ours or isinstance(reply, redis_errors.NoPermissionError):
                    raise reply
            return replies

        return await self._timed(send)

    async def script(
        self, name: str, keys: Sequence[str], args: Sequence[Any], check: Callable[[], None] | None = None
    ) -> Any:
        """Run one of the Lua scripts in `common/redis/lua`.

        If the server lacks it (it was restarted, or is another one), a user with the permission loads it.
        Workers have none: a script of their own could block the server for ever. They wait for the trainer,
        which loads missing scripts (`keep_scripts`). `check` is called before each attempt, and may raise.
        """
        source, sha = _script(name)

        async def send() -> Any:
            if check is not None:
                check()
            call = ("EVALSHA", sha, len(keys), *keys, *args)
            try:
                try:
                    return await self.redis.execute_command(*call)
                except redis_errors.NoScriptError:
                    # If another server answers the second call, its NoScriptError counts as passing.
                    await self._load(name, source)
                    return await self.redis.execute_command(*call)
            except redis_errors.ResponseError as error:
                match = _SCRIPT_ERROR.match(str(error))
                if match:
                    raise redis_errors.ResponseError(match[1]) from None
                raise

        return await self._timed(send)

    async def keep_scripts(self, state_key: str) -> None:
        """Load all scripts that the run's server lacks, for users who may not load them; safe to repeat."""
        await self.execute("HGET", state_key, "status")  # its key tells a cluster's client the run's slot
        scripts = _read_scripts()
        flags = await self.execute("SCRIPT EXISTS", *(sha for _, sha in scripts))
        missing = [source for (source, _), flag in zip(scripts, flags, strict=True) if not flag]
        if missing:
            await self.pipeline([("SCRIPT LOAD", source) for source in missing])

    async def _load(self, name: str, source: str) -> None:
        """Raises NoScriptError: this user may not load scripts."""
        if self._may_load:
            try:
                await self.redis.execute_command("SCRIPT LOAD", source)
                return
            except redis_errors.NoPermissionError:
                self._may_load = False
        raise redis_errors.NoScriptError(
            f"the server has lost its scripts ({name}), which the trainer loads again once it runs"
        )

    async def info(self, section: str) -> dict[str, str]:
        return _parse_info(await self.execute("INFO", section))

    async def memory(self) -> "MemoryUse":
        """Memory use as Redis compares it with its limit: without buffers of the AOF and of replicas."""
        info = await self.info("memory")
        counted = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
        return MemoryUse(counted, int(info["maxmemory"]), info.get("maxmemory_policy", NO_EVICTION))

    async def server_time_s(self) -> float:
        """The server's clock, which all processes of a run share; seconds since 1970."""
        seconds, micros = await self.execute("TIME")
        return int(seconds) + int(micros) / 1e6

    async def close(self) -> None:
        await self.redis.aclose()

    async def _timed(self, send: Callable[[], Awaitable[T]]) -> T:
        """Like `_patiently`; the time counts as waiting for Redis."""
        begun = self.round_trips.begin()
        try:
            return await self._patiently(send)
        finally:
            self.round_trips.end(begun)

    async def _patiently(self, send: Callable[[], Awaitable[T]]) -> T:
        """Repeat `send` while its errors are temporary: once at once, then after growing random pauses.

        Raises:
            OutageError: the service must stop, and Redis does not come back.
            BrokerError: the Redis user lacks a permission.
        """
        num_failures = 0
        since = 0.0
        while True:
            try:
                return await send()
            except redis_errors.NoPermissionError as error:
                raise BrokerError(f"the Redis user of this process lacks a permission: {error}") from None
            except Exception as error:
                if not _is_passing(error):
                    raise
                failure = error
            if str(failure).startswith(_DEMOTED) or isinstance(failure, redis_errors.ReadOnlyError):
                # The server is no longer the master: new connections ask for the master's address.
                self.redis.disconnect()
            num_failures += 1
            if num_failures == 1:  # repeated at once: one lost connection is no outage
                self.num_interruptions += 1
                since = time.monotonic()
                continue
            away_s = time.monotonic() - since
            if self.is_stopping and away_s > STOP_PATIENCE_S:
                raise OutageError(
                    f"Redis has been away for {away_s:.0f} s ({failure}), and this service was asked to "
                    "stop: it ends without handing back what it holds. Others take that over after one lease."
                )
            # Bounded: 2.0 ** 1024 raises OverflowError, and an outage of half an hour comes to that.
            longest_s = FIRST_PAUSE_S * 2.0 ** min(num_failures - 2, 16)
            # From 0 on: all workers lost their connections at once, and must not all return at once.
            await self._pause(failure, num_failures - 1, random.uniform(0.0, min(longest_s, LONGEST_PAUSE_S)))

    async def _pause(self, error: Exception, attempt: int, pause_s: float) -> None:
        self.waited_s += pause_s
        metrics.REDIS_RETRIES.inc()
        is_full = isinstance(error, redis_errors.OutOfMemoryError) or _reason(error).startswith("OOM")
        metrics.REDIS_WAIT.labels("memory" if is_full else "redis").inc(pause_s)
        if attempt in (1, 5) or attempt % 20 == 0:
            if _is_out_of_files(error):
                log.error("no connection to Redis can be opened", attempt=attempt, why=_out_of_files_text())
            else:
                log.warning("waiting for Redis", attempt=attempt, error=str(error))
        await asyncio.sleep(pause_s)


@cache
def _script(name: str) -> tuple[str, str]:
    source = _SCRIPTS.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    # Redis names scripts by SHA-1, which machines in FIPS mode refuse unless it is not used for security.
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def _read_scripts() -> list[tuple[str, str]]:
    """All scripts, which are kept from then on."""
    return [_script(file.name[:-4]) for file in _SCRIPTS.iterdir() if file.name.endswith(".lua")]


def _is_passing(error: BaseException) -> bool:
    """Whether waiting can cure the error: Redis away, loading, failing over, or out of memory."""
    # First: to redis-py wrong credentials are a ConnectionError, which would be repeated for ever.
    if isinstance(error, _FINAL) or isinstance(error.__cause__, _FINAL):
        return False
    return isinstance(error, _PASSING) or (
        isinstance(error, redis_errors.ResponseError) and _reason(error).startswith(_PASSING_PREFIXES)
    )


def _reason(error: BaseException) -> str:
    """The server's error; for a transaction that it refused at EXEC, the error that was the reason."""
    return str(error).removeprefix("EXECABORT ").removeprefix(_DISCARDED)


def _is_out_of_files(error: BaseException | None) -> bool:
    """Whether this machine or process has reached its limit of open files: no fault of Redis."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        if any(os.strerror(number) in str(error) for number in (errno.EMFILE, errno.ENFILE)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _out_of_files_text() -> str:
    """Message for people when no more files can be opened."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {limit} files and connections open, and has them; or the machine has none. "
        "Raise the limit: `ulimit -n 65536` before the start, LimitNOFILE= of a systemd unit, or "
        "`ulimits: nofile` in Compose"
    )


def _parse_info(reply: bytes | str) -> dict[str, str]:
    text = reply.decode() if isinstance(reply, bytes) else reply
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))
    return {name: value.strip() for name, value in pairs}


def _check_server(info: dict[str, str], url: str) -> None:
    version = tuple(int(number) for number in info["redis_version"].split(".")[:2])
    where = f"Redis at {public_address(url)}"
    if version < MIN_SERVER:
        raise BrokerError(f"{where} is {info['redis_version']}; 6.2 or newer is needed")
    policy = info.get("maxmemory_policy", NO_EVICTION)
    if policy != NO_EVICTION:
        raise BrokerError(
            f"{where} has maxmemory-policy {policy} and may delete entries that are still needed. "
            "Set `maxmemory-policy noeviction` (CONFIG SET and redis.conf)."
        )
    if info.get("role", "master") != "master":
        raise UnreachableError(  # a failover in progress passes
            f"{where} is a replica of {info.get('master_host')}:{info.get('master_port')} and takes no "
            "writes. Give the master's address, or redis+sentinel:// with those of its Sentinels."
        )


def _explain(error: Exception, url: str) -> BrokerError:
    """The error of a failed `connect`, with a message for people."""
    text = str(error).rstrip(".") or "it does not answer"
    where = public_address(url)
    if _is_out_of_files(error):
        return BrokerError(f"no connection to Redis at {where} can be opened: {_out_of_files_text()}.")
    if isinstance(error.__cause__, _FINAL):
        error = error.__cause__  # redis-py wraps the server's answer to AUTH in a ConnectionError
    if isinstance(error, redis_errors.AuthenticationError):
        return BrokerError(
            f"Redis at {where} refused the credentials ({text}). Set {PASSWORD_VARIABLE} (and "
            f"{USERNAME_VARIABLE} for an ACL user), or put them into {URL_VARIABLE}."
        )
    if isinstance(error, redis_errors.NoPermissionError):
        return BrokerError(f"the Redis user for {where} lacks a permission: {text}")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return BrokerError(
            f"Redis at {where} has a certificate that cannot be trusted ({text}). Set {CA_VARIABLE} to the "
            "PEM file of the authority that signed it, and use the host name that it was made for."
        )
    return UnreachableError(
        f"cannot reach Redis at {where}: {text}. Is it running, and is {URL_VARIABLE} right?"
    )
