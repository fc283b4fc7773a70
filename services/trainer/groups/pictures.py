"""Checks a sample's pictures as it is read: what cannot be trained fails that sample alone, with a reason.

Only runs with the section `images` check anything. The processor and the store are imported then.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import BrokenImageError, StoreError
from tidemill.common.store import ClaimStore
from tidemill.common.wire.images import PICTURES_FAULT, PLACEHOLDER_FAULT, Image, images_of
from tidemill.common.wire.messages import Trajectory
from tidemill.common.wire.segments import Segment

if TYPE_CHECKING:
    from tidemill.common.images.processor import PictureProcessor
    from tidemill.common.images.store import ImageStore


MOST_KEPT = 1 << 16
"""Pictures, at most, that are known to be whole: samples with the same one come at about the same time."""


class PictureCheck:
    """Threads may share it."""

    def __init__(self, store: "ImageStore", processor: "PictureProcessor") -> None:
        self._store = store
        self._processor = processor
        self._whole: set[tuple[str, int]] = set()
        """Digests and sizes of pictures that were read."""

    def fault_of(self, sample: Trajectory) -> str:
        """What is wrong with the sample's pictures or with tokens that stand for some; empty where nothing
        is.

        Raises:
            StoreError: as `ImageStore.read`. Its text begins with `PICTURES_FAULT`, as it becomes the
                sample's fault where only this picture cannot be read.
        """
        for number, segment in enumerate(sample.segments):
            fault = self._fault_of_tokens(segment, images_of(sample.images, number))
            if fault:
                return f"{PLACEHOLDER_FAULT}{fault}"
        try:
            for image in sample.images:
                self._check_image(image)
        except (BrokenImageError, ValueError) as error:
            return f"{PICTURES_FAULT}{error}"
        except StoreError as error:
            raise type(error)(f"{PICTURES_FAULT}{error}") from error
        return ""

    def _fault_of_tokens(self, segment: Segment, images: Sequence[Image]) -> str:
        """What is wrong with a segment's tokens that stand for pictures; empty where nothing is."""
        num_prompt = len(segment.prompt_ids)
        ids = np.concatenate([segment.prompt_ids, segment.completion_ids])
        is_expected = np.zeros(len(ids), dtype=np.bool_)
        for image in images:
            is_expected[image.first : image.end] = True
        # Of a completion only what an environment has shown may stand for pictures.
        is_wrong = np.isin(segment.completion_ids, self._processor.banned_ids)
        is_wrong &= segment.mask | ~is_expected[num_prompt:]
        if is_wrong.any():
            token = int(np.argmax(is_wrong))
            return (
                f"token {token} of a completion is id {segment.completion_ids[token]}, which stands for a "
                "picture and is never sampled"
            )
        is_placeholder = ids == self._processor.placeholder_id
        num_in_prompt = sum(image.first < num_prompt for image in images)
        for name, tokens, num_images in (
            ("the prompt", slice(num_prompt), num_in_prompt),
            ("a completion", slice(num_prompt, None), len(images) - num_in_prompt),
        ):
            if not np.array_equal(is_placeholder[tokens], is_expected[tokens]):
                count = np.count_nonzero(is_placeholder[tokens])
                return (
                    f"{count} tokens of {name} stand for pictures, and its {num_images} pictures have "
                    f"{np.count_nonzero(is_expected[tokens])}"
                )
        return ""

    def _check_image(self, image: Image) -> None:
        """Raises BrokenImageError, ValueError: it cannot be had, or its tokens are not the processor's."""
        count = self._processor.num_tokens_of(image.width, image.height)
        if count != image.num_tokens:
            raise ValueError(
                f"{image.num_tokens} tokens stand for a picture of {image.width} x {image.height}, and the "
                f"processor here makes {count} of it"
            )
        identity = (image.digest, image.num_bytes)
        if identity in self._whole:
            return
        self._store.read(image)
        if len(self._whole) >= MOST_KEPT:
            self._whole.clear()
        self._whole.add(identity)


def watch_pictures(claims: ClaimStore, config: RunConfig, run_dir: Path) -> None:
    """Have trajectories that are read with `claims` checked, where the run has pictures.

    Raises:
        ConfigError: there is no processor, or the store cannot be opened.
    """
    if config.images is None or claims.check_pictures is not None:
        return
    from tidemill.common.images.processor import load_processor
    from tidemill.common.images.store import ImageStore

    store = ImageStore(run_dir, config.streams.claim_check_url)
    claims.check_pictures = PictureCheck(store, load_processor(config.model.path, config.images)).fault_of
