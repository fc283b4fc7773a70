"""Prompts with pictures, as the model of an engine takes them. Loaded only where the run has `images`.

Pixels come from the processor that the trainer uses, so both sides compute from the same tensors, bit for
bit. Those of a picture are made once for all prompts that have it, such as the turns of a session, and joined
once for all requests of one prompt. Ids that stand for pixels are never sampled: they are left out of the
distribution, here and in the trainer, so logprobs stay those of the distribution that is sampled from.

Shapes: U distinct prompts, T tokens.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import BrokenImageError
from tidemill.common.images.processor import PictureProcessor, load_processor
from tidemill.common.images.recent import Recent
from tidemill.common.process.shortage import is_machine_fault
from tidemill.services.rollout.engines.engine import GenerationRequest, Picture

if TYPE_CHECKING:
    from torch import Tensor


CACHED_BYTES = 1 << 28
"""Most memory for pixels that later turns of sessions are likely to need again."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Pixels:
    """The model's inputs for the pictures of one prompt.

    Example: `digests` of two pictures of 56 x 56 pixels; of a Qwen2.5-VL `tensors` are `pixel_values` [32,
    1176] and `image_grid_thw` [[1, 4, 4], [1, 4, 4]], and `num_tokens` is (4, 4).
    """

    digests: tuple[str, ...]
    """Of the pictures, in their order."""
    tensors: "dict[str, Tensor]"
    """By the model's names."""
    num_tokens: tuple[int, ...]
    """How many tokens the processor makes of each picture."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class PromptInputs(NamedTuple):
    """What a pass over prompts gets beside ids and mask."""

    positions: "Tensor"
    """[U, T], or [4, U, T]: those of text, then time, height and width."""
    pixels: "dict[str, Tensor]"
    """The tensors of all prompts' pictures, by the model's names: `pixel_values` and its like."""
    offsets_U: "Tensor | None"
    """What is added to a later token's position to get its time, height and width; None: it has none."""


class PromptImages:
    """The pictures of an engine's requests."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError: the model's family is not one of ours, or its processor cannot be loaded."""
        assert config.images is not None, "a run of text has no pictures"
        self.processor: PictureProcessor = load_processor(config.model.path, config.images)
        self._kept: WeakValueDictionary[tuple[str, ...], Pixels] = WeakValueDictionary()
        """Pixels of a prompt, by the digests of its pictures, for as long as a request has them."""
        self._of_pictures = Recent[Pixels](CACHED_BYTES)
        """Pixels of single pictures, by digest."""
        self._in_making: dict[tuple[str, ...], asyncio.Task[Pixels]] = {}
        """Pixels of prompts that are being made, by the digests of their pictures."""

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled."""
        return self.processor.banned_ids

    async def pixels_of(self, request: GenerationRequest) -> Pixels | None:
        """The pixels of the request's pictures; None without any.

        Raises:
            BrokenImageError: the processor refuses a picture, or makes other tokens of it than the prompt
                has.
        """
        pixels = None
        if request.pictures:
            digests = tuple(picture.image.digest for picture in request.pictures)
            pixels = self._kept.get(digests)
            if pixels is None:
                # Not cancelled with this request: others wait for the same.
                pixels = await asyncio.shield(self._making(digests, request.pictures))
        self._check_tokens(request, pixels.num_tokens if pixels is not None else ())
        return pixels

    def _making(self, digests: tuple[str, ...], pictures: Sequence[Picture]) -> "asyncio.Task[Pixels]":
        making = self._in_making.get(digests)
        if making is None:
            making = asyncio.create_task(self._make(digests, pictures))
            self._in_making[digests] = making
        return making

    async def _make(self, digests: tuple[str, ...], pictures: Sequence[Picture]) -> Pixels:
        try:
            pixels = await asyncio.to_thread(self._process, digests, pictures)
            self._kept[digests] = pixels
            return pixels
        finally:
            del self._in_making[digests]

    def _process(self, digests: tuple[str, ...], pictures: Sequence[Picture]) -> Pixels:
        import torch

        of_pictures = [self._pixels_of_one(picture) for picture in pictures]
        if len(of_pictures) == 1:
            return Pixels(digests, of_pictures[0].tensors, of_pictures[0].num_tokens)
        tensors = {}
        for name in of_pictures[0].tensors:
            tensors[name] = torch.cat([pixels.tensors[name] for pixels in of_pictures])
        num_tokens = tuple(pixels.num_tokens[0] for pixels in of_pictures)
        return Pixels(digests, tensors, num_tokens)

    def _pixels_of_one(self, picture: Picture) -> Pixels:
        """The pixels of one picture. Two threads may make the same at once, which does no harm."""
        digest = picture.image.digest
        recent = self._of_pictures.get(digest)
        if recent is not None:
            return recent
        try:
            tensors = self.processor.pixels([picture.png])
            num_tokens = self.processor.num_tokens([picture.png])
        except (ValueError, OSError) as error:
            if is_machine_fault(error):
                raise
            raise BrokenImageError(f"the image processor refuses a picture: {error}") from error
        pixels = Pixels((digest,), tensors, tuple(num_tokens))
        self._of_pictures.keep(digest, pixels, pixels.num_bytes)
        return pixels

    def _check_tokens(self, request: GenerationRequest, num_tokens: Sequence[int]) -> None:
        """Check that the prompt has as many places for pictures as they have tokens. Where it has not, the
        model fails on all rows of a batch, or gives one the pictures of another.

        Raises:
            BrokenImageError: it has not.
        """
        placeholder = self.processor.placeholder_id
        prompt_ids = request.prompt_ids
        for picture, count in zip(request.pictures, num_tokens, strict=True):
            image = picture.image
            if image.num_tokens != count:
                raise BrokenImageError(
                    f"image {image.digest} has {image.num_tokens} tokens in the prompt, and this worker's "
                    f"{self.processor.name} makes {count} of it; are model.path and `images` the same on all "
                    "machines?"
                )
            if any(token != placeholder for token in prompt_ids[image.first : image.end]):
                raise BrokenImageError(
                    f"image {image.digest}: the prompt of request {request.request_id} has other tokens than "
                    f"placeholders ({placeholder}) at {image.first} to {image.end - 1}"
                )
        num_placeholders = sum(token == placeholder for token in prompt_ids)
        if num_placeholders != sum(num_tokens):
            raise BrokenImageError(
                f"the prompt of request {request.request_id} has {num_placeholders} placeholders "
                f"({placeholder}), and its {len(request.pictures)} images have {sum(num_tokens)} tokens"
            )

    def inputs_of(
        self, model: Any, pixels: Sequence[Pixels | None], ids_UT: "Tensor", mask_UT: "Tensor"
    ) -> PromptInputs:
        """The inputs of padded prompts with these pixels, each prompt's own or None."""
        import torch

        from tidemill.services.rollout.engines.decoding import position_ids

        tensors = [each.tensors for each in pixels if each is not None]
        # In the order of the rows: the model fills their placeholders one after the other.
        joined = {}
        for name in tensors[0] if tensors else ():
            joined[name] = torch.cat([each[name] for each in tensors]).to(ids_UT.device)
        positions_UT = position_ids(mask_UT)
        family = self.processor.family
        if not family.has_grid_positions:
            return PromptInputs(positions_UT, joined, None)
        is_pixel_UT = (ids_UT == self.processor.placeholder_id) & mask_UT.bool()
        # Its own arithmetic, for each row; text has the same position on all axes.
        grid_3UT, offsets_U1 = model.model.get_rope_index(
            ids_UT,
            mm_token_type_ids=is_pixel_UT.int(),
            image_grid_thw=joined.get("image_grid_thw"),
            attention_mask=mask_UT,
        )
        # With positions given, the model keeps no offsets of its own from one batch to the next.
        return PromptInputs(torch.cat([positions_UT[None], grid_3UT]), joined, offsets_U1[:, 0])
