"""What the scripts share that make the demos' small models: tokenizer, Llama, and supervised training.

Shape legend: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"
UNK = "<unk>"


def piece_tokenizer(pieces: Iterable[str], pattern: str, **options: Any) -> PreTrainedTokenizerFast:
    """Each piece is a token, and the pattern cuts a text into pieces.

    Decoding concatenates them, so text survives a round trip unchanged.
    """
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([PAD, EOS, UNK, *pieces]))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        **options,
    )


def llama_config(tokenizer: Any, **sizes: Any) -> LlamaConfig:
    """A Llama in float32, with nothing that an inference engine might not support."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        # Texts are short: a low base tells neighbouring digits apart, and halves the training.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
        **sizes,
    )


def pad_rows(rows: Sequence[Sequence[int]], starts: Sequence[int], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, right-padded to `[B, T]`, int64; a row has labels from its start on."""
    ids_BT = torch.full((len(rows), max(map(len, rows))), pad_id)
    labels_BT = torch.full_like(ids_BT, -100)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids_BT[i, : len(row)] = torch.tensor(row)
        labels_BT[i, start : len(row)] = ids_BT[i, start : len(row)]
    return ids_BT, labels_BT


def fit(
    model: Any,
    num_steps: int,
    peak_lr: float,
    batches: Callable[[], Sequence[tuple[Tensor, Tensor]]],
    name: str = "",
    warmup_steps: int = 20,
    least_lr: float = 0.05,
) -> None:
    """Supervised training: AdamW, a warm-up, and a cosine down to a share of the peak. `batches` gives ids
    and labels of a step; where it gives several, their mean losses are averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(num_steps):
        cosine = least_lr + (1 - least_lr) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (step + 1) / warmup_steps) * cosine
        optimizer.zero_grad()
        total = 0.0
        parts = batches()
        for ids_BT, labels_BT in parts:
            loss = model(input_ids=ids_BT, labels=labels_BT).loss / len(parts)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"{name:>6} step {step:4d}/{num_steps}  loss {total:.3f}", flush=True)
    model.eval()


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both, readable by workers and servers that run as another user."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written as 0600
