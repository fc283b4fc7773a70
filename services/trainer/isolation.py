"""Which layout a loaded model takes: the fast one, once a small pass has shown that it is exact.

Guarantee: sequences are packed only where the model itself was seen to keep them apart. Its configuration
cannot promise that: attention with distances in place of positions (ALiBi) fails under a block mask, and a
kernel that is not handed the boundaries reads across them without an error.
"""

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.trainer.forward import TokenScorer
from services.trainer.packing import Layout, Row, choose_layout, make_tiles

log = structlog.get_logger(__name__)

MAX_DIFFERENCE = 0.1
"""Of a token's last hidden state, relative to its norm. Rounding in bfloat16 makes 0.01 to 0.03; the first
token of a sequence that sees its neighbour differs by about 1."""


def pick_layout(model: PreTrainedModel, scorer: TokenScorer, packing: bool, device: torch.device) -> Layout:
    """The layout of this model's tiles on this device: that of `choose_layout`, if it holds."""
    config = model.config.get_text_config()
    layout = choose_layout(packing, device, config, bool(getattr(model, "_is_stateful", False)))
    if layout == "padded":
        return layout
    problem = _find_leak(scorer, layout, config.vocab_size)
    if not problem:
        return layout
    log.warning(
        "sequences are padded instead of packed, this model does not keep packed ones apart",
        model=str(model.config.model_type),
        reason=problem,
    )
    return "padded"


@torch.no_grad()
def _find_leak(scorer: TokenScorer, layout: Layout, vocab_size: int) -> str:
    """What is wrong with two packed sequences; empty where they come out as they do alone."""
    rows = [_made_up_row(i, length, vocab_size) for i, length in enumerate((9, 7))]
    try:
        packed, alone = _hidden(scorer, rows, layout), _hidden(scorer, rows, "padded")
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return " ".join(str(error).split())[:200]
    difference = float(((packed - alone).norm(dim=-1) / alone.norm(dim=-1)).max())
    return "" if difference < MAX_DIFFERENCE else f"its hidden states differ by {difference:.0%}"


def _hidden(scorer: TokenScorer, rows: list[Row], layout: Layout) -> Tensor:
    (tile,) = make_tiles(rows, layout, max_tokens=64)
    hidden_NH = scorer.score(tile, 1.0, keep_hidden=True).hidden_NH
    assert hidden_NH is not None, "they were asked for"
    return hidden_NH.float()


def _made_up_row(sample: int, length: int, vocab_size: int) -> Row:
    """No token twice, none of them 0, and other ones in each row."""
    ids = (np.arange(1, length + 1) + 10 * sample) % vocab_size
    places = np.arange(length, dtype=np.int32)
    return Row(sample, ids.astype(np.int32), places, ids.astype(np.int32))
