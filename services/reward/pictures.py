"""The pictures of samples, for rewards that see: read from the run's store by the worker.

Guarantees: a picture that is missing or damaged fails the attempts of its own samples, with the reason; a
store that is away is waited for, and nothing is failed for it. The samples of a group have the same pictures,
and these are read once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.images.recent import Recent
from tidemill.common.images.store import ImageStore, read_images
from tidemill.common.wire.images import PICTURES_FAULT, Image
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.sample import RewardSample

RECENT_BYTES = 64 << 20
"""Pictures that are kept for the other samples of their group, and for other rewards."""
PICTURES_KIND = "pictures"
"""Kind of failure of a sample whose pictures cannot be had."""


class PictureReader:
    def __init__(self, store: ImageStore, on_refusal: Callable[[BaseException], None]) -> None:
        """`on_refusal` ends the service: it gets the error of a store that refuses this process's keys."""
        self._store = store
        self._on_refusal = on_refusal
        self._reads: dict[str, asyncio.Task[bytes]] = {}
        """By digest, what is being read."""
        self._recent = Recent[bytes](RECENT_BYTES)
        """What was read."""

    async def with_pictures(self, sample: RewardSample) -> RewardSample:
        """The sample with the pictures of its prompt. Raises AttemptError: as `read`."""
        if not sample.trajectory.prompt_images:
            return sample
        return replace(sample, pictures=await self.read(sample))

    async def read(self, sample: RewardSample) -> tuple[bytes, ...]:
        """The pictures of a sample's prompt, in their order. Waits for a store that is away, without any
        limit.

        Raises:
            AttemptError: one of them is missing or damaged.
        """
        try:
            return tuple([await self._read(image) for image in sample.trajectory.prompt_images])
        except BrokenImageError as error:
            raise AttemptError(f"{PICTURES_FAULT}{error}", is_final=True, kind=PICTURES_KIND) from error
        except ConfigError as error:
            self._on_refusal(error)
            # No sample is failed for it: the service stops, cancels this, and hands back what it holds.
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody ends that wait") from error

    async def _read(self, image: Image) -> bytes:
        digest = image.digest
        png = self._recent.get(digest)
        if png is not None:
            return png
        read = self._reads.get(digest)
        if read is None:
            read = asyncio.create_task(self._read_file(image), name=f"picture {digest}")
            self._reads[digest] = read
            read.add_done_callback(partial(self._end, digest))
        # Others wait for the same picture: one that is cancelled must not end their read.
        return await asyncio.shield(read)

    async def _read_file(self, image: Image) -> bytes:
        (png,) = await read_images(self._store, [image])
        return png

    def _end(self, digest: str, read: "asyncio.Task[bytes]") -> None:
        del self._reads[digest]
        # Looked at in any case, as asyncio complains about an error that nobody has seen.
        if read.cancelled() or read.exception() is not None:
            return
        png = read.result()
        self._recent.keep(digest, png, len(png))

    async def close(self) -> None:
        """End the reads that wait for a store which is away."""
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
