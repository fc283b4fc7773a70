"""What a tokenizer writes behind every text, such as an end of text: a model that continues a text would stop
there."""

from collections.abc import Callable, Sequence
from typing import Any

TEXT = "QUESTIONTEXT"
"""Stands for any text."""


def num_appended(encode: Callable[[str, bool], Sequence[int]]) -> int:
    """How many tokens a tokenizer writes after every text, such as an end of text (`add_eos_token`). `encode`
    gives the ids of a text, with special tokens if its second argument says so."""
    plain = list(encode(TEXT, False))
    whole = list(encode(TEXT, True))
    for first in range(len(whole) - len(plain) + 1):
        if whole[first : first + len(plain)] == plain:
            return len(whole) - first - len(plain)
    return 0


def num_appended_by(tokenizer: Any) -> int:
    """`num_appended` of a tokenizer of transformers."""
    return num_appended(lambda text, special: tokenizer(text, add_special_tokens=special)["input_ids"])
