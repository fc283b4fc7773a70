"""Claim checks: a large trajectory lies in a file of the run, and its entry has pointer, size and digest.
Where a trajectory has choices, they lie in a file of their own, which only trainers read.

The file is in the run's folder, or an object in a store that all services reach; its pointer says which, so
that readers need no config. Guarantees: a file is whole and durable before the entry that claims it. A reader
gets the record as it would have come through the stream, byte for byte. If the payload is missing, wrong, or
cannot be read while others can, it gets the entry's few fields with the reason in `fault`: that sample alone
has failed. The same holds for a payload in a store that this process cannot open. Readers wait for a store
that is away, as they do for Redis, but not for one that refuses their keys: after a minute of refusals they
end with the reason. A file is removed only when no entry claims it and none can any more.
"""

import asyncio
import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import xxhash

from tidemill.common.errors import CodecError, ConfigError, RefusedError, StoreError, UnreadableError
from tidemill.common.files import StorageError, storage_errors, write_atomically
from tidemill.common.threads import BoundedThreads
from tidemill.common.wire import codec
from tidemill.common.wire.choices import check_rows
from tidemill.common.wire.messages import (
    CLAIMS_FOLDER,
    ChoiceRows,
    Choices,
    Claim,
    Message,
    Trajectory,
    fault_of,
)

if TYPE_CHECKING:
    from tidemill.common.store.objects import Objects

log = structlog.get_logger(__name__)

_NAME = re.compile(r"^\.?(?P<ticket>[0-9]+)-[0-9]+-[0-9a-f]{32}(\.[0-9a-f]{8}\.aside)?$")
"""File names of payloads, and of unfinished ones that a killed writer has left."""
RETRIES = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
"""Retries of a request to a store that is away: for some 25 s, at most a minute."""
AWAY_S = 30.0
"""Seconds for which trajectories go through the stream after the store refused one: a worker's slots must not
wait for it one after the other."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Pauses between attempts to use a store that is away."""
REFUSED_S = 60.0
"""Seconds for which a store that refuses the keys is asked again: new rights take a while to hold
everywhere."""
LAST_PAUSE_S = 2.0
"""Longest pause between attempts to read a payload that cannot be read while others can."""
MAX_OTHERS = 8
"""Payloads that are tried to find out whether others can be read."""
NUM_THREADS = 16
"""Payloads that are read or written at once."""
NO_IDS = np.zeros(0, np.int32)
NO_LOGPROBS = np.zeros(0, np.float32)


class ClaimStore:
    def __init__(
        self, run_dir: Path, least_bytes: int = 0, url: str = "", max_bytes: int | None = None
    ) -> None:
        """Payloads of at least `least_bytes` (0: none) are put in the run's folder, or below `url`. Those
        larger than `max_bytes` are not read.

        Raises:
            ConfigError: the store at `url` cannot be opened.
        """
        self.folder = run_dir / CLAIMS_FOLDER
        self.least_bytes = least_bytes
        self.max_bytes = max_bytes
        self.reads_choices = False
        """Whether `resolve` reads a trajectory's choices, too, by default."""
        self.check_pictures: Callable[[Trajectory], str] | None = None
        """Where pictures are trained: says what is wrong with those of a trajectory; `resolve` makes it the
        trajectory's `fault`. Raises StoreError: their store is away."""
        self.url = f"{url.rstrip('/')}/{run_dir.name}/{CLAIMS_FOLDER}" if url else ""
        self.threads = BoundedThreads("claims", NUM_THREADS)
        """For calls of this store: while it is away, each takes up to a minute."""
        self._opened: dict[str, Objects] = {}
        self._away_until = 0.0
        self._has_folder = False
        if self.url:
            self._objects(self.url)

    def check_in(self, sample: Trajectory) -> Trajectory:
        """The trajectory to publish: itself, or, if large, a claim to it, with a durable file. Call it after
        `check_in_choices`.

        Raises:
            StorageError: the disk is full, read-only or not there; nothing half-written is visible.
            StoreError: the object store does not take it.
        """
        if not self.least_bytes or time.monotonic() < self._away_until:
            return sample
        payload = codec.encode_payload(sample)
        if not self.is_large(payload):
            return sample
        claim = self.put(sample.ticket, sample.index, payload)
        without: dict[str, Any] = {
            "prompt_ids": NO_IDS,
            "completion_ids": NO_IDS,
            "logprobs": NO_LOGPROBS,
            "loss_mask": None,
            # Not from token 0: releases that know no claims refuse that, and do not read an empty answer.
            "spans": ((sample.min_version, 1),),
            "session": None,
            "text": "",
            "thought": None,
            "prompt_text": "",
            "own_text": "",
            "ground_truth": None,
            "extra": {},
            "images": (),
            "claim": claim,
        }
        return Trajectory.model_construct(**(sample.__dict__ | without))

    def check_in_choices(self, sample: Trajectory) -> Trajectory:
        """The sample with a claim, to a durable file, in place of the rows of its choices. Raises like
        `check_in`."""
        if sample.choices is None:
            return sample
        rows = sample.choices.rows
        digest = sample.tokens_digest
        of_sample = ChoiceRows(ticket=sample.ticket, index=sample.index, tokens_digest=digest, rows=rows)
        claim = self.put(sample.ticket, sample.index, codec.encode_payload(of_sample))
        return sample.model_copy(update={"choices": Choices(claim=claim)})

    def is_whole(self, message: Message) -> bool:
        """Whether `resolve` has nothing to read."""
        if not isinstance(message, Trajectory):
            return True
        is_read = message.claim is None and not (self.reads_choices and message.lacks_choices)
        return is_read and self.check_pictures is None

    def is_large(self, payload: bytes) -> bool:
        """Whether a claim takes the place of this payload of a sample."""
        return 0 < self.least_bytes <= len(payload)

    def put(self, ticket: int, index: int, payload: bytes) -> Claim:
        """Write a payload of a sample to a durable file; returns a claim to it.

        Raises:
            StorageError, StoreError: as `check_in`.
        """
        digest = xxhash.xxh3_128_hexdigest(payload)
        # Named by content: two workers that make the same sample write two files, one for each entry.
        name = f"{ticket}-{index}-{digest}"
        # Before the claim leaves this call: an entry that is published with it must find the payload.
        self._write(name, payload)
        pointer = f"{self.url}/{name}" if self.url else name
        return Claim(pointer=pointer, num_bytes=len(payload), digest=digest)

    def resolve(self, message: Message, reads_choices: bool | None = None) -> Message:
        """The whole trajectory of a claim, with its choices where they are wanted; if something cannot be
        read, it is left out, and `fault` says so. Any other message is returned unchanged.

        Raises:
            StoreError: the store is away, which says nothing about the payload; `UnreadableError` where other
                payloads can be read, `RefusedError` where it refuses this process's keys.
        """
        if not isinstance(message, Trajectory):
            return message
        message = self._resolve(message, reads_choices)
        if self.check_pictures is not None and not fault_of(message):
            fault = self.check_pictures(message)
            return with_fault(message, fault) if fault else message
        return message

    def _resolve(self, message: Trajectory, reads_choices: bool | None) -> Trajectory:
        claim = message.claim
        try:
            if claim is not None:
                message = self._whole(message, self.get(claim))
            wanted = self.reads_choices if reads_choices is None else reads_choices
            if not wanted or message.choices is None or message.choices.rows:
                return message
            claim = message.choices.claim
            if claim is None:
                raise ValueError("there are neither rows nor a claim to them")
            return self._with_choices(message, claim, self.get(claim))
        except (FileNotFoundError, ValueError, CodecError, ConfigError) as error:
            where = self._place(claim) if claim else "of choices"
            return with_fault(message, f"payload {where} cannot be had: {_reason(error)}")

    def _write(self, name: str, payload: bytes) -> None:
        if not self.url:
            with storage_errors("a large trajectory", self.folder):
                # Made once, in an existing run's folder. If it vanishes later, it is not mounted: with an
                # empty folder in its place, all its payloads would count as missing.
                if not self._has_folder:
                    self.folder.mkdir(exist_ok=True)
                self._has_folder = True
                write_atomically(self.folder / name, payload)
            return
        try:
            self._objects(self.url).write(name, payload)
        except StoreError:
            self._away_until = time.monotonic() + AWAY_S
            raise

    def _read(self, claim: Claim) -> bytes:
        """Raises FileNotFoundError: the store is there, the payload is not; StoreError: the store is away;
        ConfigError: this process cannot open the store; ValueError: the payload is too large."""
        if self.max_bytes is not None and claim.num_bytes > self.max_bytes:
            raise ValueError(f"{claim.num_bytes} bytes exceed the limit of {self.max_bytes}")
        url, _, name = claim.pointer.rpartition("/")
        try:
            payload = self._objects(url).read_all(name) if url else self._read_file(name)
        except (OSError, StoreError) as error:
            # A store's error has the library's as its cause.
            cause = error.__cause__ if url else error
            if isinstance(cause, FileNotFoundError):
                raise FileNotFoundError(_reason(error)) from None
            kind = type(error) if isinstance(error, RefusedError | UnreadableError) else StoreError
            if isinstance(error, OSError) and gives_others(self.folder, name):
                kind = UnreadableError
            raise kind(f"{self._place(claim)} cannot be read now: {_reason(error)}") from error
        if not url:
            # The folder exists: should it vanish now, `_write` must not make an empty one in its place.
            self._has_folder = True
        return payload

    def _read_file(self, name: str) -> bytes:
        """Raises OSError: the folder is there, the file cannot be read; StoreError: the folder is away."""
        try:
            # The folder first: if it were absent at the open of the file, the file would count as missing.
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:  # it is not mounted, which says nothing about its files
            raise StoreError(_reason(error)) from error
        try:
            with open(name, "rb", opener=partial(os.open, dir_fd=folder)) as file:
                return file.read()
        finally:
            os.close(folder)

    def _place(self, claim: Claim) -> str | Path:
        return claim.pointer if "://" in claim.pointer else self.folder / claim.pointer

    def get(self, claim: Claim) -> bytes:
        """The payload of a claim.

        Raises:
            FileNotFoundError, ValueError: it is missing, or is not what was claimed.
            ConfigError: this process cannot open the store, and waiting does not change that.
            StoreError: as `resolve`.
        """
        payload = self._read(claim)
        if len(payload) != claim.num_bytes:
            raise ValueError(f"it has {len(payload):,} bytes instead of {claim.num_bytes:,}")
        if xxhash.xxh3_128_hexdigest(payload) != claim.digest:
            raise ValueError("it does not match its digest")
        return payload

    @staticmethod
    def _whole(message: Trajectory, payload: bytes) -> Trajectory:
        """Raises ValueError or CodecError: the payload is not that of the sample it was claimed for."""
        whole = codec.decode_payload(payload, Trajectory)
        # The digest proves that these bytes were claimed, not that they belong to this sample.
        if whole.key != message.key:
            raise ValueError(f"it is of sample {whole.key}, claimed for {message.key}")
        return whole

    @staticmethod
    def _with_choices(message: Trajectory, claim: Claim, payload: bytes) -> Trajectory:
        """Raises ValueError or CodecError: the payload is of another sample, or of other tokens."""
        claimed = codec.decode_payload(payload, ChoiceRows)
        of_sample = (claimed.ticket, claimed.index, claimed.tokens_digest)
        if of_sample != (*message.key, message.tokens_digest):
            raise ValueError(f"it is of sample {of_sample}, claimed for {message.key}")
        check_rows(claimed.rows, message.segments)
        return message.model_copy(update={"choices": Choices(claim=claim, rows=claimed.rows)})

    def settled(self, first_ticket: int) -> set[str]:
        """Pointers of the files of tickets below `first_ticket`, which are settled: later tickets may still
        get entries.

        Raises:
            StoreError: the object store cannot be listed.
        """
        if self.url:
            names = self._objects(self.url).names()
        else:
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        matches = filter(None, map(_NAME.match, names))
        settled_names = {match[0] for match in matches if int(match["ticket"]) < first_ticket}
        return {f"{self.url}/{name}" for name in settled_names} if self.url else settled_names

    def remove(self, pointers: Iterable[str]) -> None:
        """Remove files that no entry claims."""
        names = [pointer.rpartition("/")[2] for pointer in pointers]
        if self.url:
            self._objects(self.url).delete(names)
            return
        for name in names:
            # May be repeated: files that a crash leaves are settled at the next trim, too.
            (self.folder / name).unlink(missing_ok=True)

    def _objects(self, url: str) -> "Objects":
        from tidemill.common.store.objects import Objects

        if url not in self._opened:  # two threads may both open it, which does no harm
            self._opened[url] = Objects(url, "streams.claim_check_url", retries=RETRIES)
        return self._opened[url]


def gives_others(folder: Path, name: str) -> bool:
    """Whether some file of the folder other than `name` can be read: then only that one is at fault."""
    try:
        others = [path for path in islice(folder.iterdir(), MAX_OTHERS) if path.name != name]
    except OSError:
        return False
    for path in others:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            # Read, not only opened: on a disk that is failing a file still opens.
            if file.read(1):
                return True
    return False


class Refusals:
    """Counts for how long a store has refused the keys of this process."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, error: Exception) -> None:
        """Take note of a failed call. Raises ConfigError: it is a refusal, as all were for `REFUSED_S`."""
        if not isinstance(error, RefusedError):
            self._since = None
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since >= REFUSED_S:
            raise ConfigError(f"{error} It has refused for {REFUSED_S:g} s") from error


async def with_choices_in(claims: ClaimStore, sample: Trajectory) -> Trajectory:
    """Like `ClaimStore.check_in_choices`, on a thread. Waits for a store that is away, without any limit.

    Raises:
        ConfigError: the store refuses the keys of this process.
    """
    pause_s = FIRST_PAUSE_S
    refusals = Refusals()
    while True:
        try:
            return await claims.threads.run(claims.check_in_choices, sample)
        except (StorageError, StoreError) as error:
            refusals.note(error)
            log.warning("waiting for the store of choices", error=str(error))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def resolved(claims: ClaimStore, message: Any, is_patient: bool = True) -> Any:
    """Like `ClaimStore.resolve`, on a thread. Waits while the store is away, and some seconds for a payload
    that cannot be read while others can; without `is_patient`, returns the fault instead.

    Raises:
        ConfigError: the store refuses the keys of this process.
    """
    pause_s = FIRST_PAUSE_S
    refusals = Refusals()
    while True:
        try:
            return await claims.threads.run(claims.resolve, message)
        except StoreError as error:
            if not is_patient or (isinstance(error, UnreadableError) and pause_s > LAST_PAUSE_S):
                return with_fault(message, str(error))
            refusals.note(error)
            log.warning("waiting for the store of large trajectories", error=str(error))
        # All readers lost the store at once, and must not all return at once.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def with_fault(claim: Trajectory, fault: str) -> Trajectory:
    return claim.model_copy(update={"fault": fault})


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
