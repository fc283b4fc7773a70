"""Claim checks: a large trajectory lies in a file of the run, and its entry has pointer, size and digest.

Guarantees: a file is whole and on the disk before the entry that claims it. A reader gets the record as it
would have come through the stream, byte for byte, or the entry's own few fields with `fault` saying what is
wrong: that sample has failed, and no other. A file goes only when no entry claims it and none can any more.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tidemill.common.errors import CodecError
from tidemill.common.files import write_atomically
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Claim, Message, Trajectory

CLAIMS_FOLDER = "claims"
"""Below the run's folder."""
_NAME = re.compile(r"^(?P<ticket>[0-9]+)-[0-9]+-[0-9a-f]{32}$")
NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class ClaimStore:
    """The files of one run, in a folder that all its services share."""

    def __init__(self, run_dir: Path, least_bytes: int = 0) -> None:
        """Payloads of `least_bytes` and more are put here; none with 0."""
        self.folder, self.least_bytes = run_dir / CLAIMS_FOLDER, least_bytes

    def check_in(self, sample: Trajectory) -> Trajectory:
        """What to publish: the trajectory, or where it is large a claim to it, whose file is durable then.

        Raises:
            StorageError: the disk is full, read-only or not there; nothing half-written is visible.
        """
        if not self.least_bytes:
            return sample
        payload = codec.encode_payload(sample)
        if len(payload) < self.least_bytes:
            return sample
        digest = xxhash.xxh3_128_hexdigest(payload)
        claim = Claim(
            pointer=f"{sample.ticket}-{sample.index}-{digest}", num_bytes=len(payload), digest=digest
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / claim.pointer, payload)
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
        except (OSError, ValueError, CodecError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fault = f"payload {self.folder / message.claim.pointer} cannot be had: {reason}"
            return message.model_copy(update={"fault": fault})

    def _read(self, message: Trajectory, claim: Claim) -> Trajectory:
        path = self.folder / claim.pointer
        if (found := path.stat().st_size) != claim.num_bytes:
            raise ValueError(f"it has {found:,} bytes instead of {claim.num_bytes:,}")
        payload = path.read_bytes()
        if xxhash.xxh3_128_hexdigest(payload) != claim.digest:
            raise ValueError("it does not match its digest")
        whole = codec.decode_payload(payload, Trajectory)
        if whole.key != message.key:
            raise ValueError(f"it is of sample {whole.key}, claimed for {message.key}")
        return whole

    def collect(self, first_ticket: int, claimed: Container[str]) -> int:
        """Remove files of settled tickets that no entry claims; returns how many. Tickets from `first_ticket`
        on are not settled: an entry of theirs may still come."""
        gone = [path for path, ticket in self._files() if ticket < first_ticket and path.name not in claimed]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def _files(self) -> Iterator[tuple[Path, int]]:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if found := _NAME.match(path.name):
                yield path, int(found["ticket"])
