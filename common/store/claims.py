"""Claim checks: a large trajectory lies in a file of the run, and its entry has pointer, size and digest. So
do the choices of every trajectory that has any, in a file of their own, which only trainers read.

The file is in the run's folder, or an object in a store that all services reach; its pointer says which, so
that whoever reads an entry needs no config. Guarantees: a file is whole and durable before the entry that
claims it. A reader gets the record as it would have come through the stream, byte for byte, or, where the
payload is missing, wrong, or cannot be read while others can, the entry's own few fields with `fault` saying
so: that sample has failed, and no other. A store that is away is waited for, as Redis is. A file goes only
when no entry claims it and none can any more.
"""

import asyncio
import contextlib
import os
import random
import re
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import xxhash

from tidemill.common.errors import CodecError, ConfigError, StoreError, UnreadableError
from tidemill.common.files import StorageError, storage_errors, write_atomically
from tidemill.common.store.objects import Objects
from tidemill.common.wire import codec
from tidemill.common.wire.choices import check_rows
from tidemill.common.wire.messages import ChoiceRows, Choices, Claim, Message, Trajectory

log = structlog.get_logger(__name__)

CLAIMS_FOLDER = "claims"
"""Below the run's folder."""
NAMES_A_CLAIM = b"\xa5claim"
"""In the payload of every entry with a claim: no need to decode the others."""
_NAME = re.compile(r"^\.?(?P<ticket>[0-9]+)-[0-9]+-[0-9a-f]{32}(\.[0-9a-f]{8}\.aside)?$")
"""Of a payload, and of what a writer that was killed has left of one."""
RETRIES = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
"""How long a store that is away is asked again: some 25 s, and no longer than a minute."""
AWAY_S = 30.0
"""Trajectories go through the stream for so long after the store took none: a worker's slots must not wait
for it one after the other."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between two looks whether a store that is away is back."""
LAST_PAUSE_S = 2.0
"""Before the last look at a payload that cannot be read while others can."""
MAX_OTHERS = 8
NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class ClaimStore:
    def __init__(
        self, run_dir: Path, least_bytes: int = 0, url: str = "", max_bytes: int | None = None
    ) -> None:
        """Payloads of `least_bytes` and more are put in the run's folder, or below `url`; none with 0. Larger
        ones than `max_bytes` are not read.

        Raises:
            ConfigError: the store at `url` cannot be opened.
        """
        self.folder, self.least_bytes, self.max_bytes = run_dir / CLAIMS_FOLDER, least_bytes, max_bytes
        self.reads_choices = False
        """Whether `resolve` reads those of a trajectory too, where it is not told."""
        self.url = f"{url.rstrip('/')}/{run_dir.name}/{CLAIMS_FOLDER}" if url else ""
        self._opened: dict[str, Objects] = {}
        self._away_until, self._has_folder = 0.0, False
        if self.url:
            self._objects(self.url)

    def check_in(self, sample: Trajectory) -> Trajectory:
        """What to publish: the trajectory, or where it is large a claim to it, whose file is durable then.
        After `check_in_choices`.

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
            # Not from token 0 on: releases that know no claims refuse that, and take it for no empty answer.
            "spans": ((sample.min_version, 1),),
            "session": None,
            "text": "",
            "prompt_text": "",
            "own_text": "",
            "ground_truth": None,
            "extra": {},
            "claim": claim,
        }
        return Trajectory.model_construct(**(sample.__dict__ | without))

    def check_in_choices(self, sample: Trajectory) -> Trajectory:
        """The sample with a claim in place of the rows of its choices, whose file is durable then. Raises as
        `check_in`."""
        if sample.choices is None:
            return sample
        rows, digest = sample.choices.rows, sample.tokens_digest
        of_sample = ChoiceRows(ticket=sample.ticket, index=sample.index, tokens_digest=digest, rows=rows)
        claim = self.put(sample.ticket, sample.index, codec.encode_payload(of_sample))
        return sample.model_copy(update={"choices": Choices(claim=claim)})

    def is_whole(self, message: Message) -> bool:
        """Whether `resolve` has nothing to read."""
        if not isinstance(message, Trajectory):
            return True
        return message.claim is None and not (self.reads_choices and message.lacks_choices)

    def is_large(self, payload: bytes) -> bool:
        """Whether a claim takes the place of this payload of a sample."""
        return 0 < self.least_bytes <= len(payload)

    def put(self, ticket: int, index: int, payload: bytes) -> Claim:
        """A claim to a payload of a sample, whose file is durable then.

        Raises:
            StorageError, StoreError: as `check_in`.
        """
        digest = xxhash.xxh3_128_hexdigest(payload)
        # By its content: two workers that make the same sample write two files, and each entry finds its own.
        name = f"{ticket}-{index}-{digest}"
        # Before the claim leaves this call: an entry that is published with it must find the payload.
        self._write(name, payload)
        pointer = f"{self.url}/{name}" if self.url else name
        return Claim(pointer=pointer, num_bytes=len(payload), digest=digest)

    def resolve(self, message: Message, reads_choices: bool | None = None) -> Message:
        """The whole trajectory of a claim, with its choices where they are wanted, or what there is of it
        with its `fault`; any other message as it is.

        Raises:
            StoreError: the store is away, which says nothing of the payload; `UnreadableError` where it gives
                others.
        """
        if not isinstance(message, Trajectory):
            return message
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
        except (FileNotFoundError, ValueError, CodecError) as error:
            where = self._place(claim) if claim else "of choices"
            return with_fault(message, f"payload {where} cannot be had: {_reason(error)}")

    def _write(self, name: str, payload: bytes) -> None:
        if not self.url:
            with storage_errors("a large trajectory", self.folder):
                # Made once, in a run's folder that is there: one that has vanished since is away, and with an
                # empty one in its place all that it holds would pass for missing.
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
        ValueError: the payload is too large."""
        if self.max_bytes is not None and claim.num_bytes > self.max_bytes:
            raise ValueError(f"{claim.num_bytes} bytes exceed the limit of {self.max_bytes}")
        url, _, name = claim.pointer.rpartition("/")
        try:
            payload = self._objects(url).read_all(name) if url else self._read_file(name)
        except (OSError, StoreError, ConfigError) as error:
            if isinstance(error.__cause__ if url else error, FileNotFoundError):
                raise FileNotFoundError(_reason(error)) from None
            is_there = isinstance(error, OSError) and self._gives_others(name)
            kind = UnreadableError if is_there else StoreError
            raise kind(f"{self._place(claim)} cannot be read now: {_reason(error)}") from error
        # It was there: should it vanish now, `_write` makes no empty one in its place.
        self._has_folder |= not url
        return payload

    def _read_file(self, name: str) -> bytes:
        """Raises OSError: the folder is there, the file cannot be read; StoreError: the folder is away."""
        try:
            # Before the file: one that comes back after a look for it would make the file pass for missing.
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:  # it is not mounted, which says nothing of its files
            raise StoreError(_reason(error)) from error
        try:
            with open(name, "rb", opener=partial(os.open, dir_fd=folder)) as file:
                return file.read()
        finally:
            os.close(folder)

    def _gives_others(self, name: str) -> bool:
        """Whether some other payload of the folder can be read."""
        try:
            others = [path for path in islice(self.folder.iterdir(), MAX_OTHERS) if path.name != name]
        except OSError:
            return False
        for path in others:
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                # Read, not only opened: on a disk that is failing a file still opens.
                if file.read(1):
                    return True
        return False

    def _place(self, claim: Claim) -> str | Path:
        return claim.pointer if "://" in claim.pointer else self.folder / claim.pointer

    def get(self, claim: Claim) -> bytes:
        """The payload of a claim.

        Raises:
            FileNotFoundError, ValueError: it is missing, or is not what was claimed.
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
        """Raises ValueError or CodecError: it is not of the sample that it was claimed for."""
        whole = codec.decode_payload(payload, Trajectory)
        # The digest says that the bytes are those that were claimed, not that they are of this sample.
        if whole.key != message.key:
            raise ValueError(f"it is of sample {whole.key}, claimed for {message.key}")
        return whole

    @staticmethod
    def _with_choices(message: Trajectory, claim: Claim, payload: bytes) -> Trajectory:
        """Raises ValueError or CodecError: it is of another sample, or of other tokens."""
        found = codec.decode_payload(payload, ChoiceRows)
        of_sample = (found.ticket, found.index, found.tokens_digest)
        if of_sample != (*message.key, message.tokens_digest):
            raise ValueError(f"it is of sample {of_sample}, claimed for {message.key}")
        check_rows(found.rows, message.segments)
        return message.model_copy(update={"choices": Choices(claim=claim, rows=found.rows)})

    def settled(self, first_ticket: int) -> set[str]:
        """Pointers of the files of tickets below `first_ticket`, which are settled: of a later one an entry
        may still come.

        Raises:
            StoreError: the object store does not say.
        """
        if self.url:
            names = self._objects(self.url).names()
        else:
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        matches = filter(None, map(_NAME.match, names))
        found = {match[0] for match in matches if int(match["ticket"]) < first_ticket}
        return {f"{self.url}/{name}" for name in found} if self.url else found

    def remove(self, pointers: Iterable[str]) -> None:
        """Remove files that no entry claims."""
        names = [pointer.rpartition("/")[2] for pointer in pointers]
        if self.url:
            self._objects(self.url).delete(names)
            return
        for name in names:
            # May be repeated: what a crash leaves is among the settled ones of the next trim.
            (self.folder / name).unlink(missing_ok=True)

    def _objects(self, url: str) -> Objects:
        if url not in self._opened:  # twice by two threads does no harm
            self._opened[url] = Objects(url, "streams.claim_check_url", retries=RETRIES)
        return self._opened[url]


async def with_choices_in(claims: ClaimStore, sample: Trajectory) -> Trajectory:
    """As `ClaimStore.check_in_choices`, on a thread. A store that takes nothing is waited for: choices never
    go through a stream."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await asyncio.to_thread(claims.check_in_choices, sample)
        except (StorageError, StoreError) as error:
            log.warning("waiting for the store of choices", error=str(error))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def resolved(claims: ClaimStore, message: Any, is_patient: bool = True) -> Any:
    """As `ClaimStore.resolve`, on a thread. A store that is away is waited for, and a payload that cannot be
    read while others can for some seconds; a person, who `is_patient` not, is shown that instead."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await asyncio.to_thread(claims.resolve, message)
        except StoreError as error:
            if not is_patient or (isinstance(error, UnreadableError) and pause_s > LAST_PAUSE_S):
                return with_fault(message, str(error))
            log.warning("waiting for the store of large trajectories", error=str(error))
        # All readers have lost the store at once, and must not come back at once.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def with_fault(claim: Trajectory, fault: str) -> Trajectory:
    return claim.model_copy(update={"fault": fault})


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
