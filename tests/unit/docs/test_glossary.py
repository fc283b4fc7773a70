"""docs/glossary.md against the code: what it names exists."""

import re
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tidemill.common.config import RunConfig

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "glossary.md"


def words() -> list[list[str]]:
    """The rows of the tables, without their heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] not in ("word", "---")]


WORDS = words()


def exists(place: str) -> bool:
    """Whether a path, a field of the config, or a symbol of a module is there."""
    if "/" in place:
        return (ROOT / place).exists()
    if place.startswith(("tidemill.common.", "tidemill.services.")):
        module, _, symbol = place.rpartition(".")
        return hasattr(import_module(module), symbol)
    return is_field(RunConfig, place.split("."))


def is_field(section: Any, names: list[str]) -> bool:
    """Whether `trainer.group_size`, for one, is a field."""
    if not names:
        return True
    if not (isclass(section) and issubclass(section, BaseModel) and names[0] in section.model_fields):
        return False
    return is_field(section.model_fields[names[0]].annotation, names[1:])


@pytest.mark.parametrize("word", WORDS, ids=lambda row: row[0])
def test_a_word_says_what_it_means_and_where_the_code_has_it(word: list[str]) -> None:
    name, meaning, where = word
    places = re.findall(r"`([^`]+)`", where)
    assert name and meaning and places
    assert [place for place in places if not exists(place)] == []


def test_every_word_stands_once() -> None:
    names = [row[0] for row in WORDS]
    assert sorted(names) == sorted(set(names))
