"""Pictures in the policy's prompts: the inputs that a model which sees needs beside token ids.

Guarantees: a sample's numbers are those of a pass over it alone (float64: 1e-12), whatever is in the tile
beside it. Pixels come from the run's store through the processor that the engines have; they are read once a
picture. In each pass the model's own tower turns each picture of a tile into features once, and rows that
share a picture share them. Positions are the model's own (`get_rope_index`), computed for each row alone.

The tower and the projector behind it are frozen unless `trainer.train_tower`. Tokens that stand for pictures
are in prompts alone, and never trained.

Shape legend: B rows, T columns of a tile, L tokens of a row, F features.
"""

import inspect
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.common.errors import ConfigError, StoreError
from tidemill.common.images.processor import load_processor
from tidemill.common.images.store import ImageStore
from tidemill.common.store.claims import Refusals
from tidemill.common.wire.images import Image
from tidemill.services.trainer.algorithm.losses.sums import TileSums
from tidemill.services.trainer.groups.trie import Indices
from tidemill.services.trainer.policy.columns import Columns
from tidemill.services.trainer.policy.layers import body_of, tower_of
from tidemill.services.trainer.policy.options import OptionSettings, PolicyOption
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.tile import Row, Tile
from tidemill.services.trainer.policy.trees import rows_at

log = structlog.get_logger(__name__)

CACHED_BYTES = 1 << 28
"""Most memory for pixels that the next passes are likely to need again."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FEATURES = "mm_encoder_outputs"
"""transformers' argument for features that are there already."""
PROCESSOR = "image_processor"
"""Name of the value in checkpoints."""

Pixels = dict[str, Tensor]
"""What the processor makes of pictures, by the model's names; the first dimension is that of pictures or of
their patches, end to end."""


@dataclass(frozen=True, slots=True, eq=False)
class TilePictures:
    """The pictures of a tile, as inputs of a pass: `ComputedInputs`."""

    pixels: Pixels
    """Pixels of its different pictures, end to end."""
    feature_T: Tensor
    """For each position of the flattened [B * T], the number of its token's feature among those of all
    pictures, end to end; -1 where it stands for none."""

    def of_model(self, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
        body: Any = body_of(model)
        named = {}
        for name, values in self.pixels.items():
            named[name] = values.to(device, model.dtype) if values.is_floating_point() else values.to(device)
        output = body.get_image_features(**named, return_dict=True)
        feature_F = self.feature_T[self.feature_T >= 0].to(device)
        output.pooler_output = _gathered(output.pooler_output, feature_F)
        # Features for the first layers of the language model, of towers that make some.
        layers: Any = getattr(output, "deepstack_features", None)
        if layers is not None:
            output.deepstack_features = [_gathered(of_layer, feature_F) for of_layer in layers]
        return {FEATURES: {"image": output}}

    def cut(self, columns: Columns) -> "TilePictures":
        # Each rank has the features of all pictures, and gradients of those in its own columns.
        return TilePictures(self.pixels, columns.cut(self.feature_T[None], filler=-1)[0])


def _gathered(of_pictures: Sequence[Tensor], feature_F: Tensor) -> tuple[Tensor]:
    return (rows_at(torch.cat(list(of_pictures)), feature_F),)


class Images(PolicyOption):
    """The pictures of one run's samples."""

    def __init__(self, settings: OptionSettings) -> None:
        pictures = settings.pictures
        assert pictures is not None, "the config asks for them"
        self._trains_tower = settings.trainer.train_tower
        self._processor = load_processor(pictures.model_path, pictures.images)
        self._banned_ids = torch.tensor(self._processor.banned_ids)
        self._store = ImageStore(pictures.run_dir, pictures.store_url)
        self._cached: OrderedDict[str, Pixels] = OrderedDict()
        self._cached_bytes = 0
        self._files: dict[str, bytes] = {}
        """Pictures of the passes that ranks have met for, by digest; but for those of `_kept`."""
        self._kept: set[str] = set()
        """Pictures of these passes whose pixels were there before."""
        # A layer is gathered from all ranks, so all have to call it: also those whose tile has no picture.
        is_shared = settings.trainer.num_ranks > 1
        self._unused = self._processor.blank() if is_shared else None
        self.processor = f"{self._processor.name} {self._processor.digest}"

    def change_model(self, model: PreTrainedModel) -> None:
        """Freeze what turns pictures into features, unless it is trained. Raises ConfigError: this release of
        transformers does not take features."""
        self._model = model
        body: Any = body_of(model)
        if FEATURES not in inspect.signature(body.forward).parameters:
            raise ConfigError(
                f"images: this release of transformers has no {FEATURES} for a {model.config.model_type}; "
                "install the locked one"
            )
        if not self._trains_tower:
            for module in tower_of(model):
                module.requires_grad_(False)

    def fetch(self, plan: Sequence[Tile]) -> None:
        pictures = {image.digest: image for tile in plan for row in tile.rows for image in row.images}
        # Their pixels stay until the next plan: were they evicted for those of an earlier tile, they would be
        # read within a pass, in which other ranks wait.
        self._kept = pictures.keys() & self._cached.keys()
        self._files = {
            digest: self._read(image) for digest, image in pictures.items() if digest not in self._kept
        }

    def complete_tile(self, tile: Tile) -> Tile:
        # Of text, too: engines leave these ids out of every distribution that they sample from.
        tile = replace(tile, banned_ids=self._banned_ids)
        pictures = {image.digest: image for row in tile.rows for image in row.images}
        if not pictures:
            if self._unused is None:
                return tile
            # Features that no token stands for: no number changes, and gradients of 0 reach the tower.
            no_feature_T = torch.full((tile.ids_BT.numel(),), -1)
            return replace(tile, computed=TilePictures(self._unused, no_feature_T))
        pixels = {digest: self._pixels_of(image) for digest, image in pictures.items()}
        starts: dict[str, int] = {}
        num_features = 0
        for digest, image in pictures.items():
            starts[digest] = num_features
            num_features += image.num_tokens
        num_positions = tile.ids_BT.numel()
        feature_of = np.full(num_positions, -1, dtype=np.int64)
        for row, places in zip(tile.rows, tile.positions_of_rows, strict=True):
            for image in row.images:
                numbers = starts[image.digest] + np.arange(image.num_tokens)
                feature_of[places[image.first : image.end]] = numbers
        ids = tile.ids_BT.flatten().numpy()
        assert np.array_equal(ids == self._processor.placeholder_id, feature_of >= 0), (
            "samples with other placeholders were left out as they arrived"
        )
        joined: Pixels = {}
        for name in next(iter(pixels.values())):
            joined[name] = torch.cat([of_picture[name] for of_picture in pixels.values()])
        computed = TilePictures(joined, torch.from_numpy(feature_of))
        kwargs = tile.model_kwargs
        if self._processor.family.has_grid_positions:
            kwargs = kwargs | {"position_ids": self._positions(tile, pixels)}
        return replace(tile, model_kwargs=kwargs, computed=computed)

    def sums_of(self, tile: Tile) -> TileSums:
        """Work of the tower, for `usage`."""
        counts = {image.digest: image.num_tokens for row in tile.rows for image in row.images}
        numbers = {
            "picture_tokens": sum(counts.values()),
            "picture_pairs": sum(count**2 for count in counts.values()),
        }
        device = tile.logprobs_N.device
        return {
            name: torch.tensor(number, dtype=torch.float64, device=device) for name, number in numbers.items()
        }

    def _positions(self, tile: Tile, pixels: Mapping[str, Pixels]) -> Tensor:
        """Positions of each token in its text, and its three of a grid. Shape [4, B, T]: with fewer rows some
        models read pictures as text, without an error."""
        text_BT = tile.model_kwargs.get("position_ids")
        if text_BT is None:
            # On behind a row's end: where they begin again, transformers looks for packed sequences.
            text_BT = torch.arange(tile.ids_BT.shape[1]).expand(tile.ids_BT.shape)
        # A text has the same positions in all four.
        positions = np.repeat(text_BT.flatten().numpy()[None], 4, axis=0)
        for row, places in zip(tile.rows, tile.positions_of_rows, strict=True):
            if row.images:
                positions[1:, places] = self._grid_positions(row, pixels)
        return torch.from_numpy(positions).view(4, *tile.ids_BT.shape)

    def _grid_positions(self, row: Row, pixels: Mapping[str, Pixels]) -> Indices:
        """The model's own positions of one row's tokens: time, height and width. Shape [3, L]."""
        types_L = np.zeros(len(row), dtype=np.int64)
        for image in row.images:
            types_L[image.first : image.end] = 1
        grids = torch.cat([pixels[image.digest]["image_grid_thw"] for image in row.images])
        body: Any = body_of(self._model)
        positions, _ = body.get_rope_index(
            input_ids=torch.from_numpy(row.ids.astype(np.int64))[None],
            mm_token_type_ids=torch.from_numpy(types_L)[None],
            image_grid_thw=grids,
        )
        grid_positions: Indices = positions[:, 0].numpy()
        return grid_positions

    def _pixels_of(self, image: Image) -> Pixels:
        """What the processor makes of a picture, on the host.

        Raises:
            BrokenImageError: it has gone from the store since its sample arrived.
            ConfigError: the store refuses the keys of this process.
        """
        pixels = self._cached.pop(image.digest, None)
        if pixels is None:
            png = self._files.get(image.digest) or self._read(image)
            pixels = self._processor.pixels([png])
            self._cached_bytes += _num_bytes(pixels)
        self._cached[image.digest] = pixels
        # The oldest first, and never that of this call.
        for digest in [*self._cached][:-1]:
            if self._cached_bytes <= CACHED_BYTES:
                break
            if digest not in self._kept:
                self._cached_bytes -= _num_bytes(self._cached.pop(digest))
        return pixels

    def _read(self, image: Image) -> bytes:
        """The stored bytes; waits while the store is away. Raises ConfigError: the store refuses the keys of
        this process."""
        pause_s = FIRST_PAUSE_S
        refusals = Refusals()
        while True:
            try:
                return self._store.read(image)
            except StoreError as error:
                refusals.note(error)
                log.warning("waiting for the store of images", error=str(error))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def state(self) -> PolicyState:
        return PolicyState({}, {PROCESSOR: self.processor})

    def check_state(self, values: Mapping[str, Any]) -> None:
        self.check_processor(str(values.get(PROCESSOR, "")), "the checkpoint")

    def check_processor(self, recorded: str, owner: str) -> None:
        """Raises ConfigError: `owner` was made with another processor, which makes other pixels."""
        if recorded and recorded != self.processor:
            raise ConfigError(
                f"{owner} was made with the image processor {recorded}, and this is {self.processor}: the "
                "same pictures have other pixels. Go on with the model folder, the section `images` and the "
                "release of transformers that the run was started with"
            )


def _num_bytes(pixels: Pixels) -> int:
    return sum(values.nbytes for values in pixels.values())
