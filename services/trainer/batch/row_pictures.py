"""The pictures of rows: taken in at the door, and their tokens in the prompt.

Only runs with the section `images` import this. A row whose pictures cannot be had is reported and left out,
as prompts that are too long are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from transformers import PreTrainedTokenizerBase

from tidemill.common.config.images import ImagesConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.data.dataset import Row
from tidemill.common.data.image_columns import text_of
from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.images.door import ImageDoor, StoredPicture
from tidemill.common.images.processor import PictureProcessor, load_processor
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.images import Image

log = structlog.get_logger(__name__)

Broken = tuple[str, str]
"""Origin of a row, and why it is left out."""
NUM_LOGGED = 10
"""Rows that are left out, of which the log names origin and reason."""


class RowPictures:
    """Takes in the pictures of rows, and writes their tokens into prompts."""

    def __init__(
        self,
        config: ImagesConfig,
        door: ImageDoor,
        processor: PictureProcessor,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config = config
        self._door = door
        self._processor = processor
        names = tokenizer.convert_ids_to_tokens(list(processor.reserved_ids))
        self._reserved = tuple(str(name) for name in names)

    @classmethod
    def of_run(cls, config: RunConfig, run_dir: Path, tokenizer: PreTrainedTokenizerBase) -> "RowPictures":
        """Raises ConfigError: the model's family, its processor or the store cannot be used."""
        assert config.images is not None, "a run without pictures does not come here"
        processor = load_processor(config.model.path, config.images)
        store = ImageStore(run_dir, config.streams.claim_check_url)
        door = ImageDoor(config.images, store, store.folder)
        return cls(config.images, door, processor, tokenizer)

    def check_text(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raises BrokenImageError: a text has a token's name that stands for pixels, and would take the place
        of a picture."""
        for message in messages:
            text = text_of(message["content"])
            for name in self._reserved:
                if name in text:
                    raise BrokenImageError(f"a message has the text {name!r}, which stands for a picture")

    def take(self, rows: Sequence[Row]) -> list[list[StoredPicture]]:
        """The pictures of each row.

        Raises:
            StorageError, StoreError: the store does not take one.
        """
        limit = self._config.max_per_prompt
        # Those of rows that are refused for their number are not even read.
        sources = [row.images if len(row.images) <= limit else () for row in rows]
        taken_in = iter(self._door.take([source for of_row in sources for source in of_row]))
        pictures = []
        for row, of_row in zip(rows, sources, strict=True):
            if len(row.images) > limit:
                reason = f"it has {len(row.images)} pictures, more than images.max_per_prompt ({limit})"
                pictures.append([StoredPicture(fault=reason)])
            else:
                pictures.append([next(taken_in) for _ in of_row])
        return pictures

    def expand(
        self, ids: Int32, pictures: Sequence[StoredPicture], row: Row
    ) -> tuple[Int32, tuple[Image, ...]]:
        """The ids with all tokens of the pictures, and the pictures with their places.

        Raises:
            BrokenImageError: a picture could not be taken in, or the processor refuses it.
            ConfigError: the chat template writes no placeholders.
        """
        for picture in pictures:
            if picture.fault:
                raise BrokenImageError(picture.fault)
        if pictures and not (ids == self._processor.placeholder_id).any():
            raise ConfigError(
                f"{row.origin}: the chat template writes no placeholder ({self._reserved[0]}) for a part of "
                "type image; put the template of a model that sees beside the tokenizer."
            )
        try:
            sizes = [(picture.width, picture.height) for picture in pictures]
            expanded, spans = self._processor.expand_sizes(ids, sizes)
        except ValueError as error:
            raise BrokenImageError(str(error)) from None
        images = [picture.at(*span) for picture, span in zip(pictures, spans, strict=True)]
        return expanded, tuple(images)

    def report(self, broken: Sequence[Broken], num_left: int) -> None:
        """Log the rows that are left out, and note their failures for a restart.

        Raises:
            ConfigError: `images.broken` is `error`, or no row is left.
        """
        if not broken:
            return
        origin, reason = broken[0]
        if self._config.broken == "error":
            raise ConfigError(
                f"{origin}: {reason}. {len(broken):,} rows cannot be used for their pictures; set "
                "images.broken: drop to leave them out."
            )
        if not num_left:
            raise ConfigError(f"{origin}: {reason}. No row is left: {len(broken):,} are left out like this.")
        first = [f"{origin}: {reason}" for origin, reason in broken[:NUM_LOGGED]]
        log.warning("rows are left out for their pictures", num_rows=len(broken), first=first)
        self._door.keep_failures()
