"""The pictures of a row: verl's and TRL's columns, and the parts of chat messages.

A row's pictures are in its column `images` (or `image`), in its messages (`{"type": "image", "image": ...}`,
`{"type": "image_url", "image_url": {"url": ...}}`), or in both: a part without a picture takes the next one
of the column. Where no message has such a part, `<image>` in a text marks the place of the next picture
(verl); without any mark all pictures are at the beginning of the first message of the user (TRL).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.images.no_pictures import IMAGES, looks_like_pictures
from tidemill.common.images.sources import ImageSource, parse_source

MARK = "<image>"
"""Stands for a picture in the texts of verl's data sets."""
TEXT_PART = "text"
IMAGE_PART = "image"
IMAGE_PARTS = (IMAGE_PART, "image_url")

Part = dict[str, Any]
"""A part of a message: `type` is `text`, with `text`, or `image`."""


class PictureColumns:
    """Reads the pictures of rows; their paths are relative to the folder `base`."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def parse_parts(self, content: Sequence[Any], where: str) -> tuple[list[Part], list[ImageSource | None]]:
        """As the function of this name."""
        return parse_parts(content, where, self._base)

    def of_row(
        self, columns: Mapping[str, Any], in_parts: Sequence[ImageSource | None]
    ) -> tuple[ImageSource, ...]:
        """All pictures of a row by the order of their places; `in_parts` are those of its messages."""
        name = column_of(columns)
        return in_order(in_parts, read_column(columns[name], self._base) if name else [])

    def names(self, columns: Mapping[str, Any], names: Mapping[Any, str]) -> set[str]:
        """The columns with pictures, which must never go through Redis; `names` are `data.columns`."""
        listed = {column_of(columns), names.get(IMAGES[0], "").partition(".")[0]}
        return listed | {name for name, value in columns.items() if looks_like_pictures(value)}

    def text_of(self, content: str | Sequence[Part]) -> str:
        """As the function of this name."""
        return text_of(content)


def column_of(columns: Mapping[str, Any]) -> str:
    """The column of a row with its pictures; empty where there is none."""
    return next((name for name in IMAGES if columns.get(name) is not None), "")


def read_column(value: Any, base: Path) -> list[ImageSource]:
    """The pictures of a column: one, or a list."""
    if isinstance(value, list | tuple):
        return [parse_source(item, base) for item in value]
    return [parse_source(value, base)]


def parse_parts(
    content: Sequence[Any], where: str, base: Path
) -> tuple[list[Part], list[ImageSource | None]]:
    """The parts of a message without pixels, and the picture of each part of type `image`: None where it
    takes the next one of the column.

    Raises:
        ConfigError: a part is neither text nor a picture. `where` names the message.
    """
    parts: list[Part] = []
    sources: list[ImageSource | None] = []
    for position, item in enumerate(content):
        kind = _kind_of(item)
        if kind == TEXT_PART and isinstance(item.get("text"), str):
            parts.append({"type": TEXT_PART, "text": item["text"]})
        elif kind in IMAGE_PARTS:
            parts.append({"type": IMAGE_PART})
            # Parquet adds nulls for keys that only other parts have.
            held = {key: value for key, value in item.items() if value is not None and key != "type"}
            has_picture = any(key in held for key in ("bytes", "path", "image", "image_url", "url"))
            sources.append(parse_source(held, base) if has_picture else None)
        else:
            raise ConfigError(
                f"{where}.content[{position}] must be a part of type text, image or image_url, got "
                f"{str(item)[:60]}."
            )
    return parts, sources


def in_order(parts: Sequence[ImageSource | None], column: Sequence[ImageSource]) -> tuple[ImageSource, ...]:
    """All pictures of a row by the order of their places."""
    if not parts:
        return tuple(column)
    waiting = list(column)
    pictures = []
    for source in parts:
        if source is None:
            source = waiting.pop(0) if waiting else ImageSource(fault="a part of type image has no picture")
        pictures.append(source)
    # Those without a place are counted with the others, and the row is refused for them.
    return (*pictures, *waiting)


def with_parts(messages: Sequence[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """The messages with lists of parts for contents, as chat templates of models that see want them, and a
    part of type `image` for each picture.

    Raises:
        BrokenImageError: there are more or fewer places than pictures, or no message to put them in.
    """
    num_parts = sum(_count_parts(message["content"]) for message in messages)
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    num_marks = sum(text.count(MARK) for text in texts) if num_images and not num_parts else 0
    num_places = num_parts or num_marks
    if num_places and num_places != num_images:
        raise BrokenImageError(f"it has {num_images} pictures and {num_places} places for them")
    with_places = [{**message, "content": _split(message["content"], num_marks > 0)} for message in messages]
    if num_images and not num_places:
        first = next((message for message in with_places if message["role"] == "user"), None)
        if first is None:
            raise BrokenImageError("no message has the role user, so its pictures have no place")
        first["content"] = [*({"type": IMAGE_PART} for _ in range(num_images)), *first["content"]]
    return with_places


def text_part(text: str) -> list[Part]:
    """A text as the content of a message, or as its end."""
    return [{"type": TEXT_PART, "text": text}]


def text_of(content: str | Sequence[Part]) -> str:
    """The text of a message, without its pictures."""
    if isinstance(content, str):
        return content
    return "".join(item["text"] for item in content if item["type"] == TEXT_PART)


def marked_text(content: Any, marks: Iterator[str]) -> Any:
    """The content of a message as text, with the next of `marks` in place of each picture. What is no list of
    texts and pictures is returned as it is.

    Example: of "What is " and a picture, with the mark `MARK`: "What is <image>".
    """
    kinds = (TEXT_PART, *IMAGE_PARTS)
    if not isinstance(content, list) or any(_kind_of(item) not in kinds for item in content):
        return content
    return "".join(item["text"] if item["type"] == TEXT_PART else next(marks) for item in content)


def _kind_of(item: Any) -> Any:
    return item.get("type") if isinstance(item, Mapping) else None


def _count_parts(content: str | Sequence[Part]) -> int:
    return 0 if isinstance(content, str) else sum(item["type"] == IMAGE_PART for item in content)


def _split(content: str | Sequence[Part], has_marks: bool) -> list[Part]:
    if not isinstance(content, str):
        return list(content)
    parts: list[Part] = []
    for position, text in enumerate(content.split(MARK) if has_marks else [content]):
        if position:
            parts.append({"type": IMAGE_PART})
        if text:
            parts.append({"type": TEXT_PART, "text": text})
    return parts
