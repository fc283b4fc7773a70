"""Tiny reward models, made here: a decoder with one score or several, a token scorer, an encoder."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from tests.support.models import PIECES, write_tokenizer
from tests.support.preloaded import Process, start_module

CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
SHAPE: dict[str, Any] = {
    "vocab_size": len(PIECES), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip


def tiny_classifier(path: Path, num_labels: int = 1, **changes: Any) -> Path:
    """A Llama with a score for each sequence."""
    return _saved(path, LlamaForSequenceClassification, _llama(num_labels, changes))


def tiny_token_scorer(path: Path, num_labels: int = 1, **changes: Any) -> Path:
    """A Llama with a score for each token."""
    return _saved(path, LlamaForTokenClassification, _llama(num_labels, changes))


def tiny_encoder(path: Path, num_labels: int = 1, **changes: Any) -> Path:
    """A BERT, which looks in both directions and pools its first token."""
    config = BertConfig(num_labels=num_labels, **(SHAPE | changes))
    return _saved(path, BertForSequenceClassification, config)


def _llama(num_labels: int, changes: dict[str, Any]) -> LlamaConfig:
    special = {"bos_token_id": None, "eos_token_id": 1}
    return LlamaConfig(num_labels=num_labels, **(SHAPE | special | changes))


def _saved(path: Path, kind: Any, config: Any) -> Path:
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config)
    model.eval().save_pretrained(path)
    write_tokenizer(path, chat_template=CHAT_TEMPLATE)
    return path


def start_server(path: Path, log: Path, *arguments: str, **variables: str) -> Process:
    """Start `python -m tidemill.services.reward.model_server` on a free port; see `server_url` for where."""
    words = ["--model", str(path), "--port", "0", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return start_module("tidemill.services.reward.model_server", words, log, environment)


def server_url(log: Path) -> str:
    """Where a server listens; empty until it does."""
    match = re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace"))
    return match[0] if match else ""
