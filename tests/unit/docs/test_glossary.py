"""docs/glossary.md against the code: what it names exists, and what the code has is in it."""

import re
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tidemill.common.config import RunConfig
from tidemill.common.wire import messages
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane, Message

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "glossary.md"


def tables() -> dict[str, list[list[str]]]:
    """The rows of the table under each heading, without its head."""
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        found[section.partition("\n")[0]] = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]
        ]
    return found


TABLES = tables()
WORDS = [row for title in ("The pipeline", "Training", "Generation and rewards") for row in TABLES[title]]


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
    words = [row[0] for row in WORDS]
    assert sorted(words) == sorted(set(words))


def test_streams_are_those_of_the_code() -> None:
    keys = Keys("run")
    lanes = {
        keys.name_of(stream(lane))
        for stream in (keys.prompts, keys.trajectories, keys.scores)
        for lane in Lane
    }
    single = {keys.name_of(stream) for stream in (keys.weights, keys.commits, keys.dead)}
    listed = {row[0].strip("`") for row in TABLES["Streams"]}
    assert listed == {name for name in lanes | single if not name.endswith(":eval")}
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in lanes)


def test_messages_and_their_fields_are_those_of_the_code() -> None:
    kinds = {
        name: kind
        for name, kind in getmembers(messages, isclass)
        if issubclass(kind, Message) and "kind" in vars(kind)
    }
    fields = {(name, field) for name, kind in kinds.items() for field in kind.model_fields}
    rows = [(row[0].strip("`"), row[1].strip("`")) for row in TABLES["Messages"]]
    assert len(rows) == len(set(rows))
    assert set(rows) == fields
    assert {row[1].strip("`") for row in TABLES["Streams"]} == set(kinds)


def test_rooms_are_those_of_the_code() -> None:
    services = [folder for folder in (ROOT / "services").iterdir() if (folder / "__init__.py").exists()]
    rooms = {
        room.relative_to(ROOT).as_posix()
        for place in (ROOT / "common", *services)
        for room in place.iterdir()
        if (room / "__init__.py").exists()
    }
    assert {row[0].strip("`") for row in TABLES["Rooms"]} == rooms
