"""Decodes one batch of prompts with a Hugging Face model: prefill once, then a token a row a step.

Prompts are padded on the left, so that every row's next token sits in the same column; position ids
count from each row's first real token, and padding is masked, so a row's tokens do not depend on its
neighbours (beyond rounding). Pictures give a prompt further inputs, and perhaps positions with four rows
(`images.py`). Where a model keeps recurrent states, prompts of one length are prefilled at a
time, without padding (`states.py`). Equal prompts, as in a group, are prefilled once. Finished rows leave the
batch once they are a quarter of it.

Shapes: B sequences, U distinct prompts, T tokens so far, V vocabulary.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import groupby, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.common.errors import EngineError
from tidemill.common.run.routers import parts_of
from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Finish
from tidemill.services.rollout.engines.engine import (
    PART_TOKENS,
    Generation,
    GenerationRequest,
    StopTexts,
    uniforms,
)
from tidemill.services.rollout.engines.states import has_keys, is_recurrent, join_rows, select_rows

if TYPE_CHECKING:
    from tidemill.services.rollout.engines.images import Pixels, PromptImages

HANDLED = ("top_p", "top_k", "min_p")
"""The filters that `processed_logprobs` applies."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B rows as tensors; a filter that no row uses is None."""

    temperature_B: Tensor
    is_greedy_B: Tensor | None
    top_k_B: Tensor | None
    top_p_B: Tensor | None
    min_p_B: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "SamplingBatch":
        """Raises EngineError: a filter is on for which there is no arithmetic here."""
        unknown = {name for row in rows for name in row.filters_on if name not in HANDLED}
        if unknown:
            raise EngineError(
                f"rollout.engine transformers does not have {', '.join(sorted(unknown))}; it has "
                f"{', '.join(HANDLED)}: leave the others at their defaults, or take another engine"
            )
        greedy = [row.temperature == 0.0 for row in rows]
        temperatures = [1.0 if row.temperature == 0.0 else row.temperature for row in rows]
        # A greedy row is not filtered, so that its logprob is that of the whole distribution.
        top_k = [row.top_k if 0 < row.top_k < vocab_size and row.temperature else vocab_size for row in rows]
        top_p = [row.top_p if row.temperature else 1.0 for row in rows]
        min_p = [row.min_p if row.temperature else 0.0 for row in rows]

        def floats(values: Sequence[float]) -> Tensor:
            # Not the default dtype: it is another one while another thread loads a model.
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            floats(temperatures),
            torch.tensor(greedy, device=device) if any(greedy) else None,
            torch.tensor(top_k, device=device) if min(top_k) < vocab_size else None,
            floats(top_p) if min(top_p) < 1.0 else None,
            floats(min_p) if max(min_p) > 0.0 else None,
        )


def processed_logprobs(logits_BV: Tensor, sampling: SamplingBatch) -> Tensor:
    """Logprobs of the distribution that is sampled from; filtered tokens are -inf. Shape [B, V], float32
    (float64 where the logits are)."""
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    logits_BV = logits_BV / sampling.temperature_B[:, None]
    if sampling.min_p_B is not None:  # first, as in vLLM: top-p then counts what it leaves
        floor_B1 = logits_BV.amax(dim=-1, keepdim=True) + sampling.min_p_B.log()[:, None]
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -torch.inf)
    if sampling.top_k_B is not None or sampling.top_p_B is not None:
        logits_BV = _filter(logits_BV, sampling.top_k_B, sampling.top_p_B)
    return torch.log_softmax(logits_BV, dim=-1)


def _filter(logits_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> Tensor:
    """Set to -inf what top-k, then top-p among the rest, leave out; the likeliest token always stays."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    if top_k_B is not None:
        ranks_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
        sorted_BV = sorted_BV.masked_fill(ranks_V[None, :] >= top_k_B[:, None], -torch.inf)
    if top_p_B is not None:
        probs_BV = sorted_BV.softmax(dim=-1)
        # The mass before a token decides, so that the one which crosses the threshold is kept.
        mass_before_BV = probs_BV.cumsum(dim=-1) - probs_BV
        drop_BV = mass_before_BV >= top_p_B[:, None]
        drop_BV[:, 0] = False
        # Rows that do not use top-p must not lose a tail to rounding in the running sum.
        drop_BV &= (top_p_B < 1.0)[:, None]
        sorted_BV = sorted_BV.masked_fill(drop_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)


def draw(logprobs_BV: Tensor, sampling: SamplingBatch, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the distribution's running sum at `uniforms_B` (float64, [0, 1)).

    Returns the ids (int64) and their logprobs (float32), both of shape [B].
    """
    # Float64: in float32 the running sum over a large vocabulary would favour its first tokens.
    mass_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    total_B = mass_BV[:, -1]
    # Rounding could make the product equal to the total, and no running sum exceeds that.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    # The first token whose running sum exceeds the target: never one of probability zero. The bound is for
    # sums that are NaN, which no token exceeds: its logprob, NaN too, says so.
    ids_B1 = torch.searchsorted(mass_BV, target_B[:, None], right=True).clamp_(max=mass_BV.shape[-1] - 1)
    if sampling.is_greedy_B is not None:
        greedy_B1 = logprobs_BV.argmax(dim=-1, keepdim=True)
        ids_B1 = torch.where(sampling.is_greedy_B[:, None], greedy_B1, ids_B1)
    return ids_B1[:, 0], logprobs_BV.gather(-1, ids_B1)[:, 0]


_COMPACT_BELOW = 0.75
"""Finished rows are dropped when less than this share of the batch is left: copying the cache costs too."""

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""What releases of transformers call a model's state: the first from 5.24 on, the others before."""

Routes = NDArray[np.unsignedinteger[Any]]
Prompt = tuple[tuple[int, ...], "Pixels | None"]
"""Ids and pictures. Requests with the same pictures share one object of these."""


@dataclass(slots=True, eq=False)
class DecodingRow:
    """One completion that is being generated. Its caller waits on `done`, which is cancelled with it.

    Example: two of at most 256 tokens are there: `token_ids` [29, 2], `logprobs` [-0.2, -0.01]. If 2 ends a
    text, `finish` is "stop".
    """

    request: GenerationRequest
    noise_key: int
    stops: StopTexts
    done: "asyncio.Future[Generation]"
    since: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    report: Callable[[], object] = lambda: None
    """Called, on the decoding thread, every `PART_TOKENS` tokens."""
    kept: list[Int32] | None = None
    """[ids kept] for each token: those it was sampled from; None if they are not recorded."""
    routes: list[Routes] = field(default_factory=list)
    """Experts of the tokens that were computed so far; empty if they are not recorded."""
    pixels: "Pixels | None" = None
    """Of the prompt's pictures."""

    @property
    def prompt(self) -> "Prompt":
        return tuple(self.request.prompt_ids), self.pixels

    @property
    def num_prompt(self) -> int:
        """Number of the prompt's tokens."""
        return len(self.request.prompt_ids)

    @property
    def choices(self) -> dict[str, Rows]:
        kept = {KEPT: Rows.of_lists(self.kept)} if self.kept else {}
        return kept | ({ROUTES: Rows(np.concatenate(self.routes))} if self.routes else {})

    def add(self, token: int, logprob: float, eos_ids: frozenset[int]) -> bool:
        """Append a sampled token, and finish where it ends the completion; returns whether it does."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in eos_ids or self.stops.reach(self.token_ids):
            self.finish = "stop"
        elif len(self.token_ids) >= self.request.sampling.max_tokens:
            self.finish = "length"
        return self.finish is not None


OnFinished = Callable[[Sequence[DecodingRow]], object]


class RouteRecorder:
    """Records what a model's routers choose, by hooks on them; nothing if there are none."""

    def __init__(self, routers: Sequence[Any]) -> None:
        self._chosen: dict[int, Tensor] = {}
        self._dtype: type[np.unsignedinteger[Any]] = np.uint8
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._note, number))

    def _note(self, number: int, router: Any, inputs: Any, output: Any) -> None:
        parts = parts_of(output)
        if parts is None:
            raise EngineError(
                f"rollout.record_routes: a {type(router).__name__} does not say which experts it chose; set "
                "it to false"
            )
        self._dtype = np.uint8 if parts[0].shape[-1] <= 256 else np.uint16
        self._chosen[number] = parts[2]

    def take(self, num_rows: int) -> Routes | None:
        """Experts of the last forward pass. Shape [rows, tokens, layers, experts of a token]."""
        if not self._chosen:
            return None
        layers = torch.stack([self._chosen[number] for number in sorted(self._chosen)], 1).cpu().numpy()
        self._chosen = {}
        return layers.reshape(num_rows, -1, *layers.shape[1:]).astype(self._dtype)


@torch.inference_mode()
def decode_batch(
    model: Any,
    rows: Sequence[DecodingRow],
    eos_ids: frozenset[int],
    recorder: RouteRecorder,
    one_length: bool = False,
    images: "PromptImages | None" = None,
    on_finished: OnFinished = lambda rows: None,
) -> None:
    """Fill in tokens, logprobs, routes and finish of every row whose caller still waits. With `one_length`
    only prompts of one length are decoded beside each other. `on_finished` is called, on this thread, with
    the rows that a token has finished."""
    if not one_length:
        _decode(_Batch(model, rows, recorder, images), eos_ids, on_finished)
        return
    by_length = sorted(rows, key=attrgetter("num_prompt"))
    for _, alike in groupby(by_length, key=attrgetter("num_prompt")):
        _decode(_Batch(model, list(alike), recorder, images), eos_ids, on_finished)


def _decode(batch: "_Batch", eos_ids: frozenset[int], on_finished: OnFinished) -> None:
    logits_BV = batch.prefill()
    step = 0
    while batch.rows:
        processed_BV = processed_logprobs(logits_BV, batch.sampling)
        ids_B, logprobs_B = batch.draw(processed_BV, step)
        logprobs = logprobs_B.tolist()
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                "the model's logits are NaN or infinite, so nothing can be sampled. Its weights are damaged, "
                "or its numbers are too large for model.dtype: set it to float32, or take another model"
            )
        finished: list[DecodingRow] = []
        drawn = zip(batch.rows, ids_B.tolist(), logprobs, batch.kept(processed_BV), strict=True)
        for row, token, logprob, kept in drawn:
            # Finished rows are decoded until it pays to drop them; their further tokens are not kept.
            if row.finish is None:
                if row.kept is not None and kept is not None:
                    row.kept.append(kept)
                if row.add(token, logprob, eos_ids):
                    finished.append(row)
                elif len(row.token_ids) % PART_TOKENS == 0:
                    row.report()
        if finished:
            on_finished(finished)
        step += 1
        ids_B = batch.drop_finished(ids_B)
        if batch.rows:
            logits_BV = batch.advance(ids_B)


class _Batch:
    """The rows that are being decoded, with the model's state for them."""

    def __init__(
        self,
        model: Any,
        rows: Sequence[DecodingRow],
        recorder: RouteRecorder,
        images: "PromptImages | None" = None,
    ) -> None:
        self.rows = list(rows)
        self._recorder = recorder
        self._model = model
        self._images = images
        self._banned = None if images is None else torch.tensor(images.banned_ids, device=model.device)
        self._offsets_B: Tensor | None = None
        self._is_recurrent = is_recurrent(model)
        self._cache_name = name_of_cache(model)
        self._cache: Any = None
        self._device: torch.device = model.device
        self._keys_B = np.array([row.noise_key for row in rows], dtype=np.uint64)
        self.sampling = self._sampling_params()

    def _sampling_params(self) -> SamplingBatch:
        vocab_size = self._model.config.get_text_config().vocab_size
        return SamplingBatch.of([row.request.sampling for row in self.rows], vocab_size, self._device)

    def prefill(self) -> Tensor:
        """Run the distinct prompts and spread the result over the rows. Returns logits of shape [B, V]."""
        prompt_of_row = [row.prompt for row in self.rows]
        prompts = list(dict.fromkeys(prompt_of_row))
        if self._is_recurrent:
            prompts.sort(key=lambda prompt: len(prompt[0]))
        position = {prompt: index for index, prompt in enumerate(prompts)}
        spread_B = torch.tensor([position[prompt] for prompt in prompt_of_row], device=self._device)
        ids = [ids for ids, _ in prompts]
        _, mask_UT = pad_left(ids, self._device)
        if self._is_recurrent:
            logits_UV, routes = self._prefill_recurrent(ids)
        else:
            logits_UV, routes = self._prefill(ids, [pixels for _, pixels in prompts])
        if routes:
            for row, prompt in zip(self.rows, prompt_of_row, strict=True):
                row.routes.append(routes[position[prompt]][row.request.sampling.num_routed :])
        if self._is_recurrent or len(prompts) < len(self.rows):
            self._select(spread_B)
            logits_UV = logits_UV[spread_B]
            mask_UT = mask_UT[spread_B]
        self._mask_BT = mask_UT
        self._next_position_B = mask_UT.sum(dim=-1)
        self._has_mask = not self._is_recurrent or has_keys(self._cache)
        return logits_UV

    def _prefill(
        self, prompts: Sequence[Sequence[int]], pixels: "Sequence[Pixels | None]"
    ) -> tuple[Tensor, list[Routes]]:
        """Logits of the tokens after the prompts, and the routes of each prompt's tokens, if recorded."""
        from transformers import DynamicCache

        ids_UT, mask_UT = pad_left(prompts, self._device)
        self._cache = DynamicCache(config=self._model.config)
        if self._images is None:
            logits_UV = self._forward(ids_UT, mask_UT, position_ids(mask_UT))
        else:
            inputs = self._images.inputs_of(self._model, pixels, ids_UT, mask_UT)
            self._offsets_B = inputs.offsets_U
            logits_UV = self._forward(ids_UT, mask_UT, inputs.positions, inputs.pixels)
        routes_UT = self._recorder.take(len(prompts))
        if routes_UT is None:
            return logits_UV, []
        starts = [ids_UT.shape[1] - len(prompt) for prompt in prompts]
        return logits_UV, [routes_T[start:] for routes_T, start in zip(routes_UT, starts, strict=True)]

    def _prefill_recurrent(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Routes]]:
        """The same of prompts that are sorted by length: those of one length at a time."""
        logits: list[Tensor] = []
        routes: list[Routes] = []
        caches: list[Any] = []
        for _, alike in groupby(prompts, key=len):
            ids_UT, mask_UT = pad_left(list(alike), self._device)
            self._cache = None  # the model makes its own
            logits.append(self._forward(ids_UT, None, position_ids(mask_UT)))
            caches.append(self._cache)
            routes_UT = self._recorder.take(len(ids_UT))
            if routes_UT is not None:
                routes += list(routes_UT)
        self._cache = join_rows(caches)
        return torch.cat(logits), routes

    def _select(self, rows_B: Tensor) -> None:
        """Keep the state of these rows."""
        if self._is_recurrent:
            select_rows(self._cache, rows_B)
        else:
            self._cache.batch_select_indices(rows_B)
        if self._offsets_B is not None:
            self._offsets_B = self._offsets_B[rows_B]

    def draw(self, processed_BV: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The next token of each row, drawn by its `step`-th random number, and its logprob."""
        uniforms_B = torch.from_numpy(uniforms(self._keys_B, step)).to(self._device)
        return draw(processed_BV, self.sampling, uniforms_B)

    def kept(self, processed_BV: Tensor) -> Sequence[Int32 | None]:
        """The ids that each row's token was sampled from; None if no row records them."""
        if all(row.kept is None for row in self.rows):
            return [None] * len(self.rows)
        # For all rows at once: one call of torch for each row takes as long as a layer.
        rows, ids = processed_BV.isfinite().nonzero(as_tuple=True)
        rows_K = rows.int().cpu().numpy()
        ids_K = ids.int().cpu().numpy()
        ends_B = np.searchsorted(rows_K, np.arange(len(self.rows)), side="right").tolist()
        return [ids_K[first:end] for first, end in pairwise([0, *ends_B])]

    def advance(self, ids_B: Tensor) -> Tensor:
        """Run one token of each row. Returns the logits of the token after it, of shape [B, V]."""
        self._mask_BT = torch.cat([self._mask_BT, self._mask_BT.new_ones(len(self.rows), 1)], dim=-1)
        mask_BT = self._mask_BT if self._has_mask else None
        positions = self._next_position_B[:, None]
        if self._offsets_B is not None:
            grid_B1 = positions + self._offsets_B[:, None]
            positions = torch.stack([positions, grid_B1, grid_B1, grid_B1])
        logits_BV = self._forward(ids_B[:, None], mask_BT, positions)
        self._next_position_B += 1
        routes_B1 = self._recorder.take(len(self.rows))
        if routes_B1 is not None:
            for row, row_routes in zip(self.rows, routes_B1, strict=True):
                if row.finish is None:
                    row.routes.append(row_routes)
        return logits_BV

    def drop_finished(self, ids_B: Tensor) -> Tensor:
        """Drop rows that are done or have no caller, if that pays. Returns the remaining ids."""
        keep = [i for i, row in enumerate(self.rows) if row.finish is None and not row.done.done()]
        if keep and len(keep) > _COMPACT_BELOW * len(self.rows):
            return ids_B
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            return ids_B
        keep_B = torch.tensor(keep, device=self._device)
        self._select(keep_B)
        self.sampling = self._sampling_params()
        self._keys_B = self._keys_B[keep]
        self._mask_BT = self._mask_BT[keep_B]
        self._next_position_B = self._next_position_B[keep_B]
        return ids_B[keep_B]

    def _forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor | None,
        positions: Tensor,
        pixels: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """`positions` [B, T], or [4, B, T] where pictures have a height and a width."""
        output = self._model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
            **pixels,
        )
        if self._is_recurrent:  # it has made its own
            self._cache = output[self._cache_name]
        logits_BV: Tensor = output.logits[:, -1]
        if self._banned is not None:
            # Before temperature and filters, as in the trainer: nobody can have sampled these.
            logits_BV = logits_BV.index_fill(-1, self._banned, -torch.inf)
        return logits_BV


def name_of_cache(model: Any) -> str:
    """The argument and the output of the model that hold its state.

    A name that the model does not know is no error: it takes any, and samples as if it had seen one token.
    """
    parameters = signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts of different lengths as ids and a mask of real tokens, both of shape [B, T], int64."""
    width = max(len(prompt) for prompt in prompts)
    ids_BT = np.zeros((len(prompts), width), dtype=np.int64)  # any id will do: padding is masked
    mask_BT = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = prompt
        mask_BT[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device)


def position_ids(mask_BT: Tensor) -> Tensor:
    """Positions that count from each row's first real token; padding gets 0. Shape [B, T]."""
    return (mask_BT.cumsum(dim=-1) - 1).clamp(min=0)
