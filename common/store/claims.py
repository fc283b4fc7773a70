"""Claim checks: a large trajectory lies in a file of the run, and its entry has pointer, size and digest.

The file is in the run's folder, or an object in a store that all services reach; its pointer says which, so
that whoever reads an entry needs no config. Guarantees: a file is whole and durable before the entry that
claims it. A reader gets the record as it would have come through the stream, byte for byte, or the entry's
own few fields with `fault` saying what is wrong: that sample has failed, and no other. A file goes only when
no entry claims it and none can any more.
"""

import re
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tidemill.common.errors import CodecError, ConfigError, StoreError
from tidemill.common.files import write_atomically
from tidemill.common.store.objects import Objects
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Claim, Message, Trajectory

CLAIMS_FOLDER = "claims"
"""Below the run's folder."""
_NAME = re.compile(r"^(?P<ticket>[0-9]+)-[0-9]+-[0-9a-f]{32}$")
RETRIES = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
"""How long a store that is away is asked again: some 25 s, and no longer than a minute."""
AWAY_S = 30.0
"""Trajectories go through the stream for so long after the store took none: a worker's slots must not wait
for it one after the other."""
NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class ClaimStore:
    """The files of one run."""

    def __init__(self, run_dir: Path, least_bytes: int = 0, url: str = "") -> None:
        """Payloads of `least_bytes` and more are put in the run's folder, or below `url`; none with 0.

        Raises:
            ConfigError: the store at `url` cannot be opened.
        """
        self.folder, self.least_bytes = run_dir / CLAIMS_FOLDER, least_bytes
        self.url = f"{url.rstrip('/')}/{run_dir.name}/{CLAIMS_FOLDER}" if url else ""
        self._opened: dict[str, Objects] = {}
        self._away_until = 0.0
        if self.url:
            self._objects(self.url)

    def check_in(self, sample: Trajectory) -> Trajectory:
        """What to publish: the trajectory, or where it is large a claim to it, whose file is durable then.

        Raises:
            StorageError: the disk is full, read-only or not there; nothing half-written is visible.
            StoreError: the object store does not take it.
        """
        if not self.least_bytes or time.monotonic() < self._away_until:
            return sample
        payload = codec.encode_payload(sample)
        if len(payload) < self.least_bytes:
            return sample
        digest = xxhash.xxh3_128_hexdigest(payload)
        name = f"{sample.ticket}-{sample.index}-{digest}"
        pointer = f"{self.url}/{name}" if self.url else name
        claim = Claim(pointer=pointer, num_bytes=len(payload), digest=digest)
        self._write(name, payload)
        without: dict[str, Any] = {
            "prompt_ids": NO_IDS,
            "completion_ids": NO_IDS,
            "logprobs": NO_LOGPROBS,
            "loss_mask": None,
            "spans": ((sample.min_version, 0),),
            "session": None,
            "text": "",
            "prompt_text": "",
            "own_text": "",
            "ground_truth": None,
            "extra": {},
            "claim": claim,
        }
        return Trajectory.model_construct(**(sample.__dict__ | without))

    def resolve(self, message: Message) -> Message:
        """The whole trajectory of a claim, or the claim with its `fault`; any other message as it is."""
        if not isinstance(message, Trajectory) or message.claim is None:
            return message
        try:
            return self._read(message, message.claim)
        except (OSError, ValueError, CodecError, StoreError, ConfigError) as error:
            pointer, reason = message.claim.pointer, getattr(error, "strerror", None) or str(error)
            place = pointer if "://" in pointer else self.folder / pointer
            return message.model_copy(update={"fault": f"payload {place} cannot be had: {reason}"})

    def _write(self, name: str, payload: bytes) -> None:
        if not self.url:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / name, payload)
            return
        try:
            self._objects(self.url).write(name, payload)
        except StoreError:
            self._away_until = time.monotonic() + AWAY_S
            raise

    def _read(self, message: Trajectory, claim: Claim) -> Trajectory:
        url, _, name = claim.pointer.rpartition("/")
        payload = self._objects(url).read_all(name) if url else (self.folder / name).read_bytes()
        if len(payload) != claim.num_bytes:
            raise ValueError(f"it has {len(payload):,} bytes instead of {claim.num_bytes:,}")
        if xxhash.xxh3_128_hexdigest(payload) != claim.digest:
            raise ValueError("it does not match its digest")
        whole = codec.decode_payload(payload, Trajectory)
        if whole.key != message.key:
            raise ValueError(f"it is of sample {whole.key}, claimed for {message.key}")
        return whole

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
            (self.folder / name).unlink(missing_ok=True)

    def _objects(self, url: str) -> Objects:
        if url not in self._opened:  # twice by two threads does no harm
            self._opened[url] = Objects(url, "streams.claim_check_url", retries=RETRIES)
        return self._opened[url]
