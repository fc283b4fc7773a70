"""Lays the samples of a micro-batch out as rectangles of token ids ("tiles"), one forward pass each.

Guarantee: in every layout a token attends to the tokens before it in its own sequence and to no other (no
leakage), so that packed, padded and row-by-row logprobs are equal up to rounding.

* `padded`: rows of like length, padded on the right, *no* attention mask. A causal model's real tokens
  never see what comes after them, so the mask would change nothing; without it attention takes its
  causal fast path, and it is right for every causal architecture (sliding windows, recurrent layers).
* `varlen`: sequences end to end in one row; flash attention gets their boundaries (`cu_seq_lens`).
* `block`: sequences end to end in a few rows, with an explicit block-diagonal causal mask for sdpa. A
  row is as wide as the longest sequence or `BLOCK_WIDTH`, because the mask is quadratic in the width.

Position ids that restart at 0 do not isolate by themselves: transformers infers boundaries from them only
where neither a mask nor a KV cache is present, and a cache is made by default (`use_cache`).

Shape legend: B rows, T columns, N scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tidemill.common.wire.arrays import Bits, Int32
from tidemill.services.trainer.groups.samples import Sample
from tidemill.services.trainer.policy.attention import VARLEN

Layout = Literal["padded", "varlen", "block"]

BLOCK_WIDTH = 1024
"""Tokens in a row of the `block` layout, unless a sequence is longer."""

SOFTMAX_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, as transformers names them, that flash attention can keep apart at boundaries."""

CPU_TILE_TOKENS = 512
"""Tokens in one forward pass on a CPU. Measured on 256 sequences of 20 to 60 tokens, 1 M parameters, one
thread: tiles of 320 to 768 tokens 0.74 to 0.77 s, of 2,048 0.82 s; one padded rectangle of all rows 2.0 s;
block-diagonal rows 0.87 s (128 wide) to 6.9 s (4,096 wide); row by row 1.5 s."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The part of one sequence that has to pass through the model to score its tokens: a whole sample, or one
    segment of it. `places` are those of the targets among the sample's completion tokens."""

    sample: int
    ids: Int32
    sources: Int32
    targets: Int32
    places: Int32

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Tile:
    """One forward pass. `rows` says which rows the N scored tokens come from, in their order. `sources_N`
    indexes the flattened [B * T] positions whose hidden state predicts `targets_N`."""

    rows: tuple[TokenRow, ...]
    ids_BT: Tensor
    sources_N: Tensor
    targets_N: Tensor
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> list[int]:
        """Indices of the samples, in the order of their scored tokens."""
        return [row.sample for row in self.rows]


def make_rows(samples: Sequence[Sample], scored: Sequence[Bits]) -> list[TokenRow]:
    """One row for each segment of a sample with a scored token; `scored` marks completion tokens, [T] each.
    Tokens after the last scored one, and that one itself, predict nothing that is needed: cut off."""
    rows = []
    for i, (sample, scored_T) in enumerate(zip(samples, scored, strict=True)):
        start = 0
        for prompt_ids, num_completion in sample.segments:
            end = start + num_completion
            chosen = np.flatnonzero(scored_T[start:end])
            if len(chosen):
                own_ids = sample.completion_ids[start:end]
                sources = (len(prompt_ids) - 1 + chosen).astype(np.int32)
                ids = np.concatenate([prompt_ids, own_ids])[: sources[-1] + 1]
                places = (start + chosen).astype(np.int32)
                rows.append(TokenRow(i, ids, sources, own_ids[chosen], places))
            start = end
    return rows


def choose_layout(
    packing: bool, device: torch.device, config: PreTrainedConfig, is_recurrent: bool = False
) -> Layout:
    """The layout that is exact and fast for a model of this configuration (that of its text, where it has
    several) on this device, as far as a configuration tells; `forward.pick_layout` tries it.

    On CPUs padding is faster (see `CPU_TILE_TOKENS`: sorted tiles of 512 tokens hold 2% padding). A model
    with recurrent layers (state space, linear attention, convolution) is padded: no mask stops their state at
    a boundary. Flash attention keeps sequences apart in every kind of softmax attention; the block mask
    replaces each layer's own, so it serves only models whose layers all attend to everything.
    """
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [window])
    if not packing or device.type == "cpu" or is_recurrent or not kinds <= SOFTMAX_ATTENTION:
        return "padded"
    attention = str(config._attn_implementation)
    if attention.startswith("flash_attention") or attention == VARLEN:
        return "varlen"
    return "block" if attention == "sdpa" and kinds == {"full_attention"} else "padded"


Lines = list[list[TokenRow]]
"""The rows of each line of a tile, from left to right."""


def plan_tiles(
    rows: Sequence[TokenRow], layout: Layout, max_tokens: int, keeps_samples: bool = False
) -> list[Lines]:
    """The lines of each tile of at most `max_tokens` positions, padding included; makes no tensor.

    A row longer than that has a tile of its own. Deterministic: longest first, ties in the given order.

    `keeps_samples` puts all rows of a sample into one tile, for losses that look at whole sequences: a sample
    of several rows has a tile of its own then, whatever its size.
    """
    if keeps_samples:
        by_sample: dict[int, list[TokenRow]] = {}
        for row in rows:
            by_sample.setdefault(row.sample, []).append(row)
        several = [own for own in by_sample.values() if len(own) > 1]
        alone = [own[0] for own in by_sample.values() if len(own) == 1]
        whole = [tile for own in several for tile in plan_tiles(own, layout, sum(map(len, own)) * len(own))]
        return plan_tiles(alone, layout, max_tokens) + whole
    # Stable: rows of one length stay in the given order, which is the one of a replay.
    ordered = sorted(rows, key=len, reverse=True)
    if layout == "padded":
        return _rectangles([[row] for row in ordered], max_tokens)
    if layout == "varlen":
        return [[packed] for packed in _fill(ordered, max_tokens)]
    width = max([min(BLOCK_WIDTH, max_tokens), *map(len, ordered)])
    lines = _fill(ordered, width)
    lines.sort(key=lambda line: sum(map(len, line)), reverse=True)
    return _rectangles(lines, max_tokens)


def make_tile(lines: Lines, layout: Layout) -> Tile:
    """A planned tile, with its tensors."""
    if layout == "varlen":
        return _varlen_tile(lines[0])
    return _block_tile(lines) if layout == "block" else _rectangle(lines)


def _fill(rows: Sequence[TokenRow], width: int) -> list[list[TokenRow]]:
    """First-fit: rows end to end in lines of at most `width` tokens."""
    lines: list[list[TokenRow]] = []
    room: list[int] = []
    for row in rows:
        index = next((i for i, free in enumerate(room) if len(row) <= free), len(lines))
        if index == len(lines):
            lines.append([])
            room.append(width)
        lines[index].append(row)
        room[index] -= len(row)
    return lines


def _rectangles(lines: Sequence[list[TokenRow]], max_tokens: int) -> list[Lines]:
    """Group lines, longest first, so that count times width stays within `max_tokens`."""
    groups: list[Lines] = []
    width = 0
    for line in lines:
        if not groups or (len(groups[-1]) + 1) * width > max_tokens:
            groups.append([])
            width = sum(map(len, line))
        groups[-1].append(line)
    return groups


def _varlen_tile(rows: Sequence[TokenRow]) -> Tile:
    """All sequences in one line; flash attention takes the boundaries as given."""
    lengths = [len(row) for row in rows]
    # The kernels take no int64 here.
    boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    kwargs = {
        "position_ids": torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return _rectangle([list(rows)], kwargs)


def _block_tile(lines: Sequence[list[TokenRow]]) -> Tile:
    """Several sequences in each line, numbered; `block_mask` keeps them apart."""
    width = max(sum(map(len, line)) for line in lines)
    # Padding is sequence 0: a row of the mask without any True gives NaN in some kernels.
    numbers_BT = np.zeros((len(lines), width), dtype=np.int32)
    positions_BT = np.zeros((len(lines), width), dtype=np.int64)
    for b, line in enumerate(lines):
        start = 0
        for number, row in enumerate(line, start=1):
            numbers_BT[b, start : start + len(row)] = number
            positions_BT[b, start : start + len(row)] = np.arange(len(row))
            start += len(row)
    return _rectangle(
        lines,
        {"position_ids": torch.from_numpy(positions_BT), SEQUENCES: torch.from_numpy(numbers_BT)},
    )


SEQUENCES = "sequence_numbers"
"""Of a block tile's positions; the model gets `block_mask` of them."""


def block_mask(numbers_BT: Tensor) -> Tensor:
    """Who attends to whom: tokens of one number, to the left. Shape [B, 1, T, T], bool."""
    width = numbers_BT.shape[1]
    # Made on the numbers' device: it is the square of what crosses to there.
    causal_TT = torch.ones(width, width, dtype=torch.bool, device=numbers_BT.device).tril()
    return ((numbers_BT[:, :, None] == numbers_BT[:, None, :]) & causal_TT)[:, None]


def _rectangle(lines: Sequence[list[TokenRow]], model_kwargs: dict[str, Any] | None = None) -> Tile:
    """Write lines of rows into a rectangle, padded with token 0, and note where the scored tokens are."""
    width = max(sum(map(len, line)) for line in lines)
    ids_BT = np.zeros((len(lines), width), dtype=np.int64)
    sources: list[Int32] = []
    for b, line in enumerate(lines):
        start = 0
        for row in line:
            ids_BT[b, start : start + len(row)] = row.ids
            sources.append(row.sources + (b * width + start))
            start += len(row)
    rows = tuple(row for line in lines for row in line)
    return Tile(
        rows=rows,
        ids_BT=torch.from_numpy(ids_BT),
        sources_N=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
        targets_N=torch.from_numpy(np.concatenate([row.targets for row in rows]).astype(np.int64)),
        model_kwargs=model_kwargs or {},
    )
