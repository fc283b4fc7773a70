"""Halves of surrogate pairs in text.

JSON and YAML can write one (`"\\ud83d"`), and Python takes it, but it is no character: neither UTF-8 nor a
tokenizer can encode it. JSON makes one character of two halves; PyYAML leaves them apart.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LONE = re.compile("[\ud800-\udfff]")
REMEDY = "write the character itself, or take it out"


class Half(NamedTuple):
    """Where half of a surrogate pair is: the path of the text in a tree, and the character in it from 0.

    Example: `where` "data.prompt", `character` 3, `code` "\\ud83d".
    """

    where: str
    character: int
    code: str

    def __str__(self) -> str:
        return (
            f"{self.where} holds half of a surrogate pair, {self.code} at character {self.character}, which "
            "is no text"
        )


def find_halves(tree: Any, where: str) -> Iterator[Half]:
    """The first half in each text of lists and maps, keys included. `where` is the path of the tree."""
    if isinstance(tree, str):
        if not tree.isascii() and (match := LONE.search(tree)):
            yield Half(where, match.start(), ascii(match[0]).strip("'"))
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            path = f"{where}.{LONE.sub('?', str(key))}".lstrip(".")
            yield from find_halves(str(key), f"the name {path}")
            yield from find_halves(value, path)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            if isinstance(value, str | Mapping | list | tuple):  # lists of token ids are long
                yield from find_halves(value, f"{where}[{index}]")
