"""What a policy may have beside its model: options, each a file that is imported where a run's config asks.

The core of the policy imports none of these files, which an import contract checks. It calls hooks of
`policy.options`, in the order of `OPTIONS`, and reads attributes, which stand here after a `;`. An option
overrides those that it needs:

    as the policy is made      change_model, join, beside_model, modules; optimizer
    a tile and its pass        fetch, complete_tile, around_trial, around_pass, pass_scores, columns_of,
                               sums_of; reads_hidden
    columns of samples         precompute; columns
    an update, a step          begin_update, end_step
    a checkpoint               state, check_state; freezes_model
    what is published          base_of, published, save_beside, marks
    what the trainer asks      ; routing, processor

Where several ranks train, each of them has the same options and calls the same hooks in the same order, so
that a hook may make calls of all ranks.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.run.routers import find_routers, is_mixture
from tidemill.services.trainer.algorithm.losses.sums import Sums, TileSums
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.optimizer import AdamW
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.tile import Row, Tile

if TYPE_CHECKING:
    from tidemill.common.config.images import ImagesConfig
    from tidemill.common.wire.routes import Routing
    from tidemill.services.trainer.policy.forward import TokenScorer


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """Where pictures of prompts are, and what processes them."""

    model_path: str
    images: "ImagesConfig"
    run_dir: Path
    store_url: str = ""
    """An object store in place of the run's folder."""


@dataclass(frozen=True, slots=True)
class OptionSettings:
    """What options are chosen by, and made of."""

    trainer: TrainerConfig
    dtype: torch.dtype
    """Of the forward pass."""
    device: torch.device
    """Where the weights will be, if the model has none yet."""
    seed: int = 0
    """The run's."""
    base_digest: str = ""
    """Of the files of a model whose weights are not read yet."""
    replays_routes: bool = False
    """Whether engines record which experts they chose."""
    pictures: PictureSettings | None = None
    """None for a run of text."""


class BesideModel(NamedTuple):
    """What an option trains beside the model."""

    parameters: list[tuple[str, nn.Parameter]]
    """Under the names that optimizer, digest and checkpoint use."""
    lr: float | None = None
    """Peak learning rate; None for that of the model."""
    is_clipped_alone: bool = False
    """Whether their gradients are clipped by themselves, and not with the model's."""


class PolicyCore(Protocol):
    """What an option sees of its policy."""

    device: torch.device

    @property
    def scorer(self) -> "TokenScorer":
        """That of the model under training; once all options have joined."""

    def make_scorer(self, model: PreTrainedModel) -> "TokenScorer":
        """A scorer of a model beside the policy's, which is split over ranks where the policy's is."""

    def split_layer(self, layer: nn.Module) -> None:
        """Split over ranks, where there are several, a trained layer that is called by itself."""

    def score_samples(self, parts: Sequence[Sequence[Sample]], scorer: "TokenScorer") -> list[SampleColumns]:
        """`logprobs` of all completion tokens under a model, and `entropies` where the algorithm needs them:
        [T] of each sample, in the order of the parts. Samples of one part alone share a forward pass."""

    def score_rows(self, rows: Sequence[Row]) -> Tile:
        """Scores of those rows that fit into the first pass; of one made-up token where there are none."""


class PolicyOption:
    """One option of one policy. Every hook does nothing unless it is overridden."""

    processor = ""
    """Name and digest of what makes pixels of pictures, for commits."""
    routing: "Routing | None" = None
    """The routers that are given the engine's experts: the policy's own `routing`."""
    reads_hidden = False
    """Whether `columns_of` needs `hidden_NH` of a tile."""
    columns: tuple[str, ...] = ()
    """Columns of `columns_of` that each sample gets in `precompute`, under the weights before the step. Each
    is a row of `COLUMNS` (`groups/columns.py`)."""
    optimizer: type[AdamW] | None = None
    """The kind of AdamW that trains, in place of torch's own."""
    freezes_model = False
    """Whether a checkpoint and the digest of commits have what is trained in place of the whole model."""

    def __init__(self, settings: OptionSettings) -> None:
        """Called by `load_options`, before any hook."""

    # As the policy is made: `change_model` of all options, then `join` of all, then the policy's own scorer.

    def change_model(self, model: PreTrainedModel) -> None:
        """Change the model in place. Called by the policy's constructor, before the model is copied, split
        over ranks, or given to an optimizer. Raises ConfigError: the model does not allow it."""

    def join(self, model: PreTrainedModel, policy: PolicyCore) -> None:
        """Make what stands beside the model, as a copy of it or not. Called by the policy's constructor, once
        all options have changed the model; the model is still whole, and moves only after this."""

    def beside_model(self) -> BesideModel | None:
        """What it trains beside the model. Called by the policy's constructor, after `join`."""

    def modules(self) -> list[nn.Module]:
        """Modules beside the model. Called by the constructor, which has the layers of those that are trained
        computed again where the config says so; and when the policy leaves its device or comes back."""
        return []

    # A tile, and its pass through the model.

    def fetch(self, plan: Sequence[Tile]) -> None:
        """Read what the passes of these tiles need from elsewhere. Called where several ranks train, before
        they meet for the first of these passes: within them no rank may be late."""

    def complete_tile(self, tile: Tile) -> Tile:
        """The tile with more inputs of the model (`model_kwargs`). Called by the policy for each tile, when
        its tensors have been made and before any model or rank gets it: the reference and the critic have the
        same inputs. Also for tiles without rows, of ranks that have no samples left: they make the same calls
        of all ranks as the others."""
        return tile

    def around_trial(self) -> AbstractContextManager[None]:
        """Surrounds the first pass of the policy's model, over made-up tokens. Called by `TokenScorer`, once.
        Raises ConfigError: the model cannot do what the option needs."""
        return nullcontext()

    def around_pass(self, tile: Tile, device: torch.device) -> AbstractContextManager[None]:
        """Surrounds each pass of the policy's model. Called by `TokenScorer.score`; gradients are computed
        where torch says so."""
        return nullcontext()

    def pass_scores(self, sources_N: Tensor) -> dict[str, Any]:
        """Scores that only the option has seen in a pass, as fields of `Tile`, at these flat positions.
        Called by `TokenScorer.score` within `around_pass`, where gradients are computed."""
        return {}

    def columns_of(self, tile: Tile) -> dict[str, Tensor]:
        """Columns of the tile's scored tokens as they are now, [N], with gradient. Called by the policy after
        the tile's pass: in training, where the loss gets `values_N` of it, and in `precompute`."""
        return {}

    def sums_of(self, tile: Tile) -> TileSums:
        """More sums over a tile's trained tokens. Called by the policy after the tile's backward pass."""
        return {}

    # Columns of samples.

    def precompute(self, parts: Sequence[Sequence[Sample]], policy: PolicyCore) -> list[SampleColumns]:
        """Columns from passes of its own, of each sample in the order of the parts; none where it has none.
        Called by the policy's `precompute`, under the current weights."""
        return []

    # An update, and a step.

    def begin_update(self, batch: MicroBatch, plan: Sequence[Tile], policy: PolicyCore) -> Sums:
        """Measure something once an update. Called by the policy before the first micro-batch of each update
        is trained; `plan` has its tiles, without tensors."""
        return Sums()

    def end_step(self, num_steps: int, model: PreTrainedModel) -> None:
        """Follow the model. Called by the policy's `update`, after the last update of a step; `num_steps` are
        done."""

    # A checkpoint.

    def state(self) -> PolicyState:
        """What a checkpoint keeps beside what is trained: views of tensors, which a load fills, and values.
        Called by the policy's `state` and `load_state`."""
        return PolicyState({})

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Check a checkpoint's values. Called by the policy's `load_state`, before anything is changed.
        Raises ConfigError: it is the state of something else."""

    # What is published.

    def base_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors without this option, by the names that they have then: the names and shapes of
        what is published, and of the files that the model is read from. Called where weights are read, and
        once before they are first published."""
        return tensors

    def published(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """What engines get in place of the model's tensors, by the names of `base_of`. Called by the policy
        for each digest and each version."""
        return tensors

    def save_beside(self, folder: Path, writes: bool) -> None:
        """Write files beside a version's weights; of several ranks one `writes`. Called by the policy's
        `begin_writing`; where a disk refuses, that is called again, on all ranks."""

    def marks(self) -> dict[str, Tensor]:
        """Bytes that the digest of commits covers beside what is trained. Called for each digest."""
        return {}


IsWanted = Callable[[OptionSettings, PreTrainedModel], bool]


class OptionRow(NamedTuple):
    implementation: str
    """The file beside this one, and the class in it."""
    is_wanted: IsWanted
    """Whether a run has it."""


def _has_pictures(settings: OptionSettings, _: PreTrainedModel) -> bool:
    return settings.pictures is not None


def _wants_adapters(settings: OptionSettings, _: PreTrainedModel) -> bool:
    return settings.trainer.lora is not None


def _may_want_liger(settings: OptionSettings, _: PreTrainedModel) -> bool:
    # With `on` it says why it is not possible.
    return settings.trainer.liger == "on" or (
        settings.trainer.liger == "auto" and settings.device.type == "cuda"
    )


def _wants_compiler(settings: OptionSettings, _: PreTrainedModel) -> bool:
    return settings.trainer.compile


def _wants_moments_on_host(settings: OptionSettings, _: PreTrainedModel) -> bool:
    return settings.trainer.offload_optimizer


def _wants_copy_for_reference(settings: OptionSettings, _: PreTrainedModel) -> bool:
    return settings.trainer.algorithm.needs_reference and settings.trainer.lora is None


def _wants_value_head(settings: OptionSettings, _: PreTrainedModel) -> bool:
    algorithm = settings.trainer.algorithm
    return algorithm.needs_values and algorithm.value.model != "own"


def _wants_critic(settings: OptionSettings, _: PreTrainedModel) -> bool:
    algorithm = settings.trainer.algorithm
    return algorithm.needs_values and algorithm.value.model == "own"


def _wants_routers(settings: OptionSettings, model: PreTrainedModel) -> bool:
    if settings.trainer.algorithm.router.is_on:
        return True
    return settings.replays_routes and (is_mixture(model.config) or bool(find_routers(model)))


OPTIONS = {
    "images": OptionRow("images:Images", _has_pictures),
    "adapters": OptionRow("adapters:Adapters", _wants_adapters),
    "liger": OptionRow("liger:LigerKernels", _may_want_liger),
    # After adapters and kernels: it tries, and compiles, the layers that are trained.
    "compiler": OptionRow("compiling:Compiler", _wants_compiler),
    "reference": OptionRow("reference:ReferenceModel", _wants_copy_for_reference),
    "value_head": OptionRow("value_head:ValueHead", _wants_value_head),
    "critic": OptionRow("critic:Critic", _wants_critic),
    # After the reference and the critic: a copy of a model with its hooks would run the policy's routers.
    "routers": OptionRow("routers:Routers", _wants_routers),
    "offload": OptionRow("offload:OffloadedMoments", _wants_moments_on_host),
}
"""By name, in the order in which hooks are called: where it decides, a line says why."""


def load_options(settings: OptionSettings, model: PreTrainedModel) -> list[PolicyOption]:
    """The options that a run asks for; their files are imported now."""
    options = []
    for row in OPTIONS.values():
        if row.is_wanted(settings, model):
            file, _, name = row.implementation.partition(":")
            kind = getattr(importlib.import_module(f"{__package__}.{file}"), name)
            options.append(kind(settings))
    return options
