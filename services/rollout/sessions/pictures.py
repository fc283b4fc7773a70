"""Pictures that a session shows: of its row, of an environment's answers, of an agent's requests.

A picture comes in as bytes, base64 or a `data:` URL, in a part of a chat message. It is made into our form
once (`common/images/pictures.py`), stored by digest, and from then on stands in messages as a reference:

    {"type": "image", "digest": "5a0c...", "num_bytes": 1204, "width": 56, "height": 56}

Guarantees: the picture is stored before anything names it; a session's ids have all tokens of each picture,
as the processor of engine and trainer counts them; and what a text says of such tokens is text.

Addresses and paths are refused: what they lead to may change between a turn and its repetition, and in a
session the model may have chosen them.
"""

import contextlib
import errno
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from tidemill.common.config.images import ImagesConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.data.image_columns import IMAGE_PART
from tidemill.common.errors import BrokenImageError, ConfigError, StoreError
from tidemill.common.files import StorageError
from tidemill.common.images.no_pictures import WEB
from tidemill.common.images.pictures import make_picture
from tidemill.common.images.processor import PictureProcessor, load_processor
from tidemill.common.images.recent import Recent
from tidemill.common.images.sources import ImageSource, parse_source
from tidemill.common.images.store import ImageStore, read_images, waiting
from tidemill.common.process.shortage import is_machine_fault, run_on_thread
from tidemill.common.wire.images import Image
from tidemill.services.rollout.sessions.picture_parts import (
    Message,
    Reference,
    image_of,
    picture_in,
    reference_to,
    references_in,
    size_of,
)

CACHED_BYTES = 1 << 28
"""Most bytes of pictures that are kept for later turns of their sessions."""
MOST_NOTED = 1 << 14
"""Most pictures whose references are kept: clients send the same ones again with each request."""


class SessionPictures:
    """Takes in the pictures of one worker's sessions, and reads them for its engine."""

    def __init__(self, images: ImagesConfig, store: ImageStore, processor: PictureProcessor) -> None:
        self.max_per_prompt = images.max_per_prompt
        self.max_file_bytes = int(images.max_file_mb * (1 << 20))
        self._images = images
        self._store = store
        self._processor = processor
        self._references: OrderedDict[str, Reference] = OrderedDict()
        """By label and digest of the bytes that came in."""
        self._files = Recent[bytes](CACHED_BYTES)
        self._lock = Lock()

    @classmethod
    def of_run(cls, config: RunConfig, run_dir: Path) -> "SessionPictures | None":
        """None where the run has no pictures.

        Raises:
            ConfigError: the processor or the store cannot be used.
        """
        if config.images is None:
            return None
        store = ImageStore(run_dir, config.streams.claim_check_url)
        return cls(config.images, store, load_processor(config.model.path, config.images))

    async def take(self, picture: Any) -> Reference:
        """Take a picture in: bytes, or a `data:` URL. Waits for a store that is away, and for a disk that is
        full, read-only or not there.

        Raises:
            BrokenImageError: it is none that is taken.
            ConfigError: pillow is not installed, or the store refuses the keys of this process; or the run's
                folder is none that it may write to.
        """
        reference = await waiting(self._store, lambda: self._take(picture))
        return dict(reference)

    async def take_message(self, message: Message) -> dict[str, Any]:
        """The message with references in place of its pictures. Raises as `take`."""
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        parts = []
        for item in content:
            picture = picture_in(item)
            parts.append(item if picture is None else await self.take(picture))
        return {**message, "content": parts}

    async def read(self, images: Sequence[Image]) -> list[bytes]:
        """The bytes of stored pictures. Waits for a store that is away.

        Raises:
            BrokenImageError: one is missing or damaged.
            ConfigError: the store refuses the keys of this process.
        """
        files: dict[str, bytes] = {}
        missing = []
        for image in images:
            png = self._files.get(image.digest)
            if png is None:
                missing.append(image)
            else:
                files[image.digest] = png
        # Where none is missing no thread is asked: while the store is away, all may wait for it.
        if missing:
            read = await read_images(self._store, missing)
            # Before they are kept: who finds a picture in memory may expand it at once.
            await self.count_tokens([(image.width, image.height) for image in missing])
            for image, png in zip(missing, read, strict=True):
                self._files.keep(image.digest, png, len(png))
                files[image.digest] = png
        for image in images:
            # A program that sends a picture of its row back means this one, whatever its library makes of it.
            self._note(f"PNG:{image.digest}", reference_to(image))
        return [files[image.digest] for image in images]

    def expand(
        self, ids: Sequence[int], messages: Sequence[Message], first: int = 0
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Rendered ids with all tokens of the messages' pictures, and the pictures with their places, counted
        from `first` on. The chat template has written one placeholder for each.

        Raises:
            ValueError: it has written more or fewer, or two without text between them.
        """
        references = list(references_in(messages))
        sizes = [size_of(reference) for reference in references]
        expanded, spans = self._processor.expand_sizes(ids, sizes)
        images = [
            image_of(reference, first + start, num_tokens)
            for reference, (start, num_tokens) in zip(references, spans, strict=True)
        ]
        return expanded.tolist(), tuple(images)

    async def count_tokens(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Count the tokens of pictures of these widths and heights, on a thread where a size is new: `expand`
        needs them, the processor takes up to half a second for one, and the event loop must not wait."""
        for width, height in sizes:
            if not self._processor.has_counted(width, height):
                with contextlib.suppress(ValueError):  # `expand` says which it refuses
                    await run_on_thread(self._processor.num_tokens_of, width, height)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises ValueError: ids that a client has chosen stand for pixels."""
        banned = next((token for token in ids if token in self._processor.banned_ids), None)
        if banned is not None:
            raise ValueError(f"the id {banned} stands for a picture; send pictures in messages")

    def _take(self, picture: Any) -> Reference:
        source = _source_of(picture)
        if source.fault or source.content is None:
            raise BrokenImageError(source.fault or "it is empty")
        if len(source.content) > self.max_file_bytes:
            raise BrokenImageError(
                f"it has {len(source.content):,} bytes, more than {self._images.max_file_mb:g} MB "
                "(images.max_file_mb)"
            )
        key = f"{source.label}:{xxhash.xxh3_128_hexdigest(source.content)}"
        with self._lock:
            noted = self._references.get(key)
        if noted is not None:
            return noted
        stored = make_picture(source.content, self._images.max_pixels, source.label)
        try:
            self._processor.num_tokens_of(stored.width, stored.height)
        except ValueError as error:
            raise BrokenImageError(f"the image processor refuses it: {error}") from None
        digest = self._put(stored.png)
        reference = {
            "type": IMAGE_PART,
            "digest": digest,
            "num_bytes": len(stored.png),
            "width": stored.width,
            "height": stored.height,
        }
        self._files.keep(digest, stored.png, len(stored.png))
        self._note(key, reference)
        return reference

    def _put(self, png: bytes) -> str:
        try:
            return self._store.put(png)
        except StorageError as error:
            # No folder: it is not mounted just now. Waited for, as where it is read.
            if error.can_clear or error.errno == errno.ENOENT:
                raise StoreError(str(error)) from error
            if is_machine_fault(error):
                raise
            raise ConfigError(str(error)) from error

    def _note(self, key: str, reference: Reference) -> None:
        with self._lock:
            self._references[key] = reference
            if len(self._references) > MOST_NOTED:
                self._references.popitem(last=False)


def _source_of(picture: Any) -> ImageSource:
    if isinstance(picture, ImageSource):
        return picture
    if isinstance(picture, bytes | str) and not _is_address(picture):
        return parse_source(picture, Path())
    if isinstance(picture, str):
        scheme = picture.partition("://")[0].lower()
        kind = "an address" if scheme in WEB else "a path"
        return ImageSource(
            fault=f"it is {kind}, {picture[:80]!r}, and a session reads none; send the picture itself, as "
            "base64 in a data: URL"
        )
    return ImageSource(fault=f"it is {type(picture).__name__}; expected bytes, or base64 in a data: URL")


def _is_address(picture: bytes | str) -> bool:
    return isinstance(picture, str) and not picture.startswith("data:")
