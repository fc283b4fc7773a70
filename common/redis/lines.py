"""Connections with automatic pipelining: calls are sent without waiting for the answers of earlier ones.

A call is sent at once if no other call of its connection is unanswered, so that the server works while the
next one is prepared. Later calls of the same iteration of the event loop, by any callers, are sent in one
write, and their answers come in one read: a worker with hundreds of samples under way pays for two round
trips, not for hundreds. An error of one call does not affect the others. A blocking command has a connection
of its own while it blocks.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import hiredis
import structlog
from redis import __version__ as VERSION
from redis import exceptions as redis_errors

ANSWER_TIMEOUT_S = 30.0
"""Longer than any blocking read of ours, so that it only fires when the server is gone."""
MAX_BLOCKING = 32
"""Most commands that block at once; others wait."""
SEND_BUFFER_BYTES = 1 << 20
"""Send buffer of a Unix socket, as far as the system allows it (net.core.wmem_max)."""

Command = Sequence[Any]
T = TypeVar("T")
log = structlog.get_logger(__name__)

_MULTI = hiredis.pack_command(("MULTI",))
_EXEC = hiredis.pack_command(("EXEC",))
_MORE = object()


def has_known_parts(connection: Any) -> bool:
    """Whether an open connection has the private attributes that `Line` uses: other versions may not."""
    transport = getattr(getattr(connection, "_writer", None), "transport", None)
    has_parser = callable(getattr(getattr(connection, "_parser", None), "parse_error", None))
    return isinstance(transport, asyncio.Transport) and has_parser and hasattr(connection, "_reader")


def _packed(command: Command) -> bytes:
    """The bytes of a command; its name may have two words."""
    name: str = command[0]
    packed: bytes = hiredis.pack_command((*name.split(), *command[1:]) if " " in name else tuple(command))
    return packed


def _widen(transport: asyncio.BaseTransport) -> None:
    """Enlarge the send buffer of a Unix socket (200 kB by default), so that a call of many records is sent at
    once. Those of TCP grow by themselves."""
    server_socket = transport.get_extra_info("socket")
    if server_socket is not None and server_socket.family == socket.AF_UNIX:
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


class _Call:
    """Commands whose answers one caller waits for."""

    __slots__ = ("begun", "future", "is_atomic", "num_missing", "replies")

    def __init__(self, num_replies: int, is_atomic: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.num_missing = num_replies
        self.is_atomic = is_atomic
        self.replies: list[Any] = []
        self.future: asyncio.Future[list[Any]] = loop.create_future()
        self.begun = loop.time()

    def answer(self) -> None:
        if self.future.done():  # its caller was cancelled
            return
        try:
            self.future.set_result(_outcome(self.replies, self.is_atomic))
        except redis_errors.RedisError as error:
            self.future.set_exception(error)


def _outcome(replies: list[Any], is_atomic: bool) -> list[Any]:
    """The replies of a unit. Raises RedisError: the transaction was refused, and nothing was done."""
    outcome = replies[-1] if is_atomic else replies
    if isinstance(outcome, Exception):  # the error of the first refused command is the reason
        raise next((reply for reply in replies if isinstance(reply, Exception)), outcome)
    answers: list[Any] = outcome
    return answers


class Line(asyncio.Protocol):
    """One connection. It replaces the streams that redis-py puts on it, which copy every reply."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(
            protocolError=redis_errors.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_MORE,
        )
        self._waiting: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._num_unsent = 0
        """Calls that were not sent yet; the last ones in `_waiting`."""
        self._is_flush_due = False
        self._watch: asyncio.TimerHandle | None = None
        self.error: redis_errors.RedisError | None = None
        """Why the connection is no longer usable."""
        self.is_loss_unknown = False
        """Whether it was lost with no call under way, so that no caller has seen the error."""
        self.client_id: Any = None
        """The server's id of this connection, once asked for; an error where the user lacks permission."""
        self._transport: asyncio.Transport = connection._writer.transport
        self._transport.set_protocol(self)
        _widen(self._transport)
        if self._transport.is_closing():
            self.fail(redis_errors.ConnectionError("Connection closed by server."))

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made, and the server is still the current one of the address."""
        return self.error is None and getattr(self._connection, "is_current", True)

    def exchange(
        self, unit: Sequence[Command], is_atomic: bool = False, goes_with_next: bool = False
    ) -> asyncio.Future[list[Any]]:
        """Send commands, in a transaction where `is_atomic`; the future has the replies, errors as values.

        With `goes_with_next` they are sent with the next call, or at the end of this loop iteration.

        Raises, here or where the replies are awaited:
            RedisError: the connection was lost, the server did not answer, or it refused the transaction.
        """
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        call = _Call(len(unit) + 2 if is_atomic else len(unit), is_atomic, self._loop)
        packed = [_packed(command) for command in unit]
        self._unsent += [_MULTI, *packed, _EXEC] if is_atomic else packed
        self._waiting.append(call)
        self._num_unsent += 1
        # At once if all unanswered calls are unsent: the server has nothing to do for this connection.
        if self._num_unsent == len(self._waiting) and not goes_with_next:
            self._flush()
        else:
            self._flush_soon()
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_TIMEOUT_S, self._look)
        return call.future

    def data_received(self, data: bytes) -> None:
        """Assign replies to the waiting calls, in the order of the commands."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                call = self._waiting[0]
                call.replies.append(reply)
                call.num_missing -= 1
                if not call.num_missing:
                    self._waiting.popleft().answer()
        except IndexError:
            self.fail(redis_errors.InvalidResponse("the server answered what nobody had asked"))
        except redis_errors.RedisError as error:
            self.fail(error)
        # After the callers that were just answered have run: their next calls are sent together.
        self._flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(redis_errors.ConnectionError(str(exc or "") or "Connection closed by server."))

    def fail(self, error: redis_errors.RedisError) -> None:
        """Close the connection; waiting calls get the error."""
        if self.error is not None:
            return
        self.error = error
        self.is_loss_unknown = all(call.future.done() for call in self._waiting)
        for call in self._waiting:
            if not call.future.done():
                # One for each: an exception raised by several tasks would collect all their tracebacks.
                call.future.set_exception(type(error)(*error.args))
        self._waiting.clear()
        self._unsent.clear()
        if self._watch is not None:
            self._watch.cancel()
        self._transport.abort()
        # Or redis-py would warn that the connection was never closed.
        self._connection._writer = None
        self._connection._reader = None

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent:
            unsent = self._unsent
            self._unsent = []
            self._num_unsent = 0
            self._transport.write(b"".join(unsent) if len(unsent) > 1 else unsent[0])

    def _look(self) -> None:
        """Fail if the server has not answered in time; else look again when that would be."""
        self._watch = None
        if self._waiting:
            left_s = self._waiting[0].begun + ANSWER_TIMEOUT_S - self._loop.time()
            if left_s <= 0:
                self.fail(redis_errors.TimeoutError("it does not answer"))
            else:
                self._watch = self._loop.call_later(left_s, self._look)


class PlainLine:
    """One connection by redis-py's public methods alone, one call at a time, for versions of redis-py with
    other private attributes than `Line` uses. Slower, and otherwise the same."""

    is_loss_unknown = False
    """Always false: only a call finds that the connection was lost."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.error: redis_errors.RedisError | None = None
        self.client_id: Any = None

    @property
    def is_usable(self) -> bool:
        return self.error is None and getattr(self._connection, "is_current", True)

    def exchange(
        self, unit: Sequence[Command], is_atomic: bool = False, goes_with_next: bool = False
    ) -> asyncio.Future[list[Any]]:
        # Shielded: a cancelled caller must leave no answer unread, or the next caller would get it.
        return asyncio.shield(self._start(self._exchange(unit, is_atomic)))

    def fail(self, error: redis_errors.RedisError) -> None:
        if self.error is None:
            self.error = error
            self._start(self._connection.disconnect(nowait=True))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _exchange(self, unit: Sequence[Command], is_atomic: bool) -> list[Any]:
        commands = [("MULTI",), *unit, ("EXEC",)] if is_atomic else unit
        async with self._lock:
            if self.error is not None:
                raise type(self.error)(*self.error.args)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._connection.send_packed_command(
                        [_packed(command) for command in commands], False
                    )
                    replies = [await self._reply() for _ in commands]
            except (redis_errors.RedisError, OSError, TimeoutError) as error:
                # Answers may still be under way, and the next call would get them.
                self.fail(redis_errors.ConnectionError(str(error) or type(error).__name__))
                raise
        return _outcome(replies, is_atomic)

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except redis_errors.ResponseError as error:
            return error


class Client:
    """The connections to one server: one that all calls share, and one for each command that blocks now."""

    def __init__(self, make_connection: Callable[[], Any]) -> None:
        """`make_connection` makes asynchronous connections of redis-py, not yet connected."""
        self._make_connection = make_connection
        self._shared: Line | PlainLine | None = None
        self._opening: asyncio.Task[Line | PlainLine] | None = None
        self._idle: list[Line | PlainLine] = []
        self._blocking: set[Line | PlainLine] = set()
        self._places = asyncio.Semaphore(MAX_BLOCKING)

    async def exchange(
        self, unit: Sequence[Command], is_atomic: bool = False, is_blocking: bool = False
    ) -> list[Any]:
        """Like `Line.exchange`, connecting where needed."""
        if not unit:
            return []
        if is_blocking:
            return await self._exchange_alone(unit)
        line = self._shared
        if line is not None and line.error is not None and line.is_loss_unknown:
            # As if a call had been under way: the server may have failed, and lost its last writes.
            line.is_loss_unknown = False
            raise type(line.error)(*line.error.args)
        if line is None or not line.is_usable:
            line = await self._open_shared()
        return await line.exchange(unit, is_atomic)

    def ask(self, command: Command) -> asyncio.Future[list[Any]] | None:
        """Send a command with the next call, never repeated; None where no connection is open. The future has
        one reply or error, and is done before the answers of later calls."""
        line = self._shared
        return line.exchange([command], goes_with_next=True) if line and line.is_usable else None

    async def execute_command(self, *command: Any, is_blocking: bool = False) -> Any:
        (reply,) = await self.exchange([command], is_blocking=is_blocking)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def unblock(self) -> None:
        """End the commands that block now as if they had timed out. Unlike closing their connections, this
        loses no entries that the server is just delivering. Where the server refuses it, they wait on.

        Raises:
            RedisError, OSError: the server cannot be reached.
        """
        ids = [line.client_id for line in self._blocking if isinstance(line.client_id, int)]
        await self.exchange([("CLIENT", "UNBLOCK", number) for number in ids])

    def disconnect(self) -> None:
        """Close all connections without a blocking command; calls under way fail, to be repeated."""
        self._drop(filter(None, (self._shared, *self._idle)))
        self._shared = None
        self._idle = []

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            # Ended first, or it would leave a connection open.
            await asyncio.wait({self._opening})
        self.disconnect()
        self._drop(list(self._blocking))
        await asyncio.sleep(0)  # transports close in the next iteration of the loop

    def _drop(self, lines: Any) -> None:
        for line in lines:
            line.fail(redis_errors.ConnectionError("the connection was given up"))

    async def _exchange_alone(self, unit: Sequence[Command]) -> list[Any]:
        async with self._places:
            line = self._idle.pop() if self._idle else None
            if line is None or not line.is_usable:
                if line is not None:
                    self._drop([line])
                line = await self._open()
            self._blocking.add(line)
            try:
                if line.client_id is None:
                    (line.client_id,) = await line.exchange([("CLIENT", "ID")])
                replies = await line.exchange(unit)
            except asyncio.CancelledError:
                self._drop([line])  # the command's late answer must not go to another caller
                raise
            finally:
                self._blocking.discard(line)
            # Only after an answer, or the next caller would get it.
            self._idle.append(line)
            return replies

    async def _open_shared(self) -> Line | PlainLine:
        """One new connection for all callers that wait for it, even if one of them is cancelled."""
        if self._opening is None:
            if self._shared is not None:
                self._drop([self._shared])
            self._opening = asyncio.create_task(self._open(), name="connect to Redis")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[Line | PlainLine]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._shared = opening.result()

    async def _open(self) -> Line | PlainLine:
        connection = self._make_connection()
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await connection.connect()
        if task and task.cancelling() > before:
            # redis-py connects through `asyncio.wait_for`, which before Python 3.12 loses a cancellation
            # that comes just as its inner task ends. A loop that reads from Redis would then never end.
            await connection.disconnect(nowait=True)
            raise asyncio.CancelledError
        if has_known_parts(connection):
            return Line(connection)
        log.warning(
            "this redis-py has other parts inside than Tidemill knows: calls are slower", version=VERSION
        )
        return PlainLine(connection)
