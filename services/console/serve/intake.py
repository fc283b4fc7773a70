"""Reads requests: their bodies within limits, and large ones in a process of its own.

Guarantees: the bodies that are held at once have at most `MAX_HELD_BYTES`; what is refused is not kept; and
no request holds up the others while it is parsed, which takes seconds for the largest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request

from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import MachineFaultError
from tidemill.common.process.json_api import (
    MAX_BODY_BYTES,
    BusyError,
    InputError,
    TooLargeError,
    UnavailableError,
)
from tidemill.common.process.programs import Child
from tidemill.common.process.worker_process import ProcessEndedError, StartupError, WorkerProcess
from tidemill.common.wire.messages import Lane
from tidemill.services.console.serve.samples import Batch, EncodedSample, ScoringRequest, has_pictures

MAX_HELD_BYTES = 2 * MAX_BODY_BYTES
SMALL_BYTES = 64 << 10
"""Requests of up to so many bytes are parsed where they are read: milliseconds."""
PART_BYTES = 1 << 20
PARSE_S = 300.0
"""Longest time to send a request to the process that reads, to parse it, or to make a part of its samples."""
LATE = f"it took longer than {PARSE_S:g} s"
RETRY_S = 1.0


class IncomingRequest(Protocol):
    """A request that is parsed and valid."""

    num_samples: int
    num_groups: int
    num_bytes: int
    """Size of its body."""

    def encoded(self, first_ticket: int) -> AsyncIterator[list[EncodedSample]]:
        """Its samples in order, in parts, as trajectories of the tickets from `first_ticket` on."""


class SmallRequest:
    def __init__(self, batch: Batch, num_bytes: int = 0) -> None:
        self._batch = batch
        self.num_bytes = num_bytes
        self.num_samples = len(batch.samples)
        self.num_groups = batch.num_groups

    async def encoded(self, first_ticket: int) -> AsyncIterator[list[EncodedSample]]:
        yield [self._batch.encoded(first_ticket, position) for position in range(self.num_samples)]


class LargeRequest:
    """A request in the process that reads; that process has it until the next one."""

    def __init__(self, reader: "RequestReader", num_samples: int, num_groups: int, num_bytes: int) -> None:
        self._reader = reader
        self.num_bytes = num_bytes
        self.num_samples = num_samples
        self.num_groups = num_groups

    async def encoded(self, first_ticket: int) -> AsyncIterator[list[EncodedSample]]:
        begin = 0
        while begin < self.num_samples:
            answer = await self._reader.ask({"first_ticket": first_ticket, "begin": begin})
            begin += len(answer["samples"])
            yield [
                EncodedSample(Lane(lane), (ticket, index), schema, payload)
                for lane, ticket, index, schema, payload in answer["samples"]
            ]


class RequestReader:
    """Reads requests: small ones at once, large ones and those with pictures one at a time in a process that
    is started with the first. Pictures are decoded and stored there."""

    def __init__(self, images: ImagesConfig | None = None, run_dir: Path = Path(), url: str = "") -> None:
        """`images` is the config's section; pictures are stored in the run's folder, or below `url`."""
        plain = None if images is None else images.model_dump(mode="json")
        self._setup: dict[str, Any] = {"images": plain, "run_dir": str(run_dir), "url": url}
        self._num_held_bytes = 0
        self._process: WorkerProcess | None = None
        self._is_reading = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def request_of(
        self, http: Request, check_room: Callable[[], object] = lambda: None
    ) -> AsyncIterator[IncomingRequest]:
        """The request in the body of an HTTP request; its samples have to be taken inside. `check_room` is
        called before anything is read, and may raise too.

        Raises:
            ValidationError, InputError: it is no valid request.
            TooLargeError: it has more than `MAX_BODY_BYTES`. BusyError: too much is held already.
            UnavailableError: the process that reads cannot be started, or has ended; or pictures cannot be
                stored now.
        """
        with self._holding() as hold:
            body = await _body(http, hold, check_room)
            num_bytes = len(body)
            if num_bytes <= SMALL_BYTES:
                request = ScoringRequest.model_validate_json(body)
                if not has_pictures(request):
                    yield SmallRequest(Batch(request.samples), num_bytes)
                    return
            async with self._is_reading:
                await self._send(body)
                del body
                answer = await self.ask({})
                if "error" in answer:
                    raise InputError(answer["error"])
                if "away" in answer:
                    raise UnavailableError(f"its pictures cannot be stored now: {answer['away']}", RETRY_S)
                yield LargeRequest(self, answer["num_samples"], answer["num_groups"], num_bytes)

    async def _send(self, body: bytearray) -> None:
        """Send a body in parts: others are answered between them."""
        process = await self._started()
        try:
            async with asyncio.timeout(PARSE_S):
                for begin in range(0, len(body), PART_BYTES):
                    chunk = bytes(memoryview(body)[begin : begin + PART_BYTES])
                    process.send({"begin": begin, "part": chunk})
                    await process.drain()
        except TimeoutError:
            raise await self._unavailable(LATE) from None

    async def _started(self) -> WorkerProcess:
        """The process that reads. Raises UnavailableError: it cannot be started."""
        try:
            if self._process is None:
                self._process = WorkerProcess(Child.REQUESTS, "requests")
            await self._process.start(self._setup)
            return self._process
        except (OSError, StartupError, MachineFaultError) as error:
            raise await self._unavailable(str(error)) from None

    async def ask(self, frame: dict[str, Any]) -> dict[str, Any]:
        """The answer of the process that reads. Raises UnavailableError: there is none."""
        process = await self._started()
        try:
            return await process.ask(frame, PARSE_S)
        except ProcessEndedError as error:
            raise await self._unavailable(str(error)) from None
        except TimeoutError:
            raise await self._unavailable(LATE) from None

    async def _unavailable(self, reason: str) -> UnavailableError:
        await self.close()  # the next request gets a process of its own
        return UnavailableError(f"the request was not read: {reason}; send it again", RETRY_S)

    async def close(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            await process.wait()

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """Yields `hold(wanted)`, to be called as a body grows: it counts a body of `wanted` bytes, all of it,
        as held until the end of the block."""
        num_bytes = 0

        def hold(wanted: int) -> None:
            nonlocal num_bytes
            if wanted > MAX_BODY_BYTES:
                raise TooLargeError(
                    f"the request has more than {MAX_BODY_BYTES:,} bytes: send its samples in several "
                    "requests, with all samples of a group in one of them"
                )
            added = max(0, wanted - num_bytes)
            if self._num_held_bytes + added > MAX_HELD_BYTES:
                raise BusyError(f"requests of {self._num_held_bytes:,} bytes are being read already", RETRY_S)
            self._num_held_bytes += added
            num_bytes += added

        try:
            yield hold
        finally:
            self._num_held_bytes -= num_bytes


async def _body(http: Request, hold: Callable[[int], None], check_room: Callable[[], object]) -> bytearray:
    chunks = http.stream()
    content = bytearray()
    try:
        check_room()
        declared = http.headers.get("content-length", "")
        hold(int(declared) if declared.isascii() and declared.isdigit() else 0)
        async for chunk in chunks:
            content += chunk
            # A request need not declare its length.
            hold(len(content))
    except (BusyError, TooLargeError):
        content.clear()
        if http.headers.get("expect", "").lower() == "100-continue":  # nothing is sent before it is asked for
            raise
        num_bytes = 0
        # Read, and not kept: a client that cannot send all of its request never reads why it was refused.
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES:
                break
        raise
    return content
