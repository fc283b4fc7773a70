"""Parts of chat messages that are pictures: as they come in, and as references once they are stored.

    {"type": "image", "picture": b"..."}      as it comes in: the bytes of a file, or a `data:` URL
    {"type": "image", "digest": "5a0c...", "num_bytes": 1204, "width": 56, "height": 56}
    {"type": "image"}                         takes the next picture of the row

A message without pictures has text for its content, never a list.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemill.common.data.image_columns import IMAGE_PART, TEXT_PART, with_parts
from tidemill.common.errors import BrokenImageError
from tidemill.common.wire.images import Image

Message = Mapping[str, Any]
Reference = dict[str, Any]
"""A part that stands for a stored picture."""


def picture_in(item: Any) -> Any:
    """The picture in a part of a message that is not taken in yet; None where there is none, as in text and
    references."""
    return item.get("picture") if isinstance(item, Mapping) and item.get("type") == IMAGE_PART else None


def has_picture(content: Any) -> bool:
    """Whether the content of a message has a picture, taken in or not."""
    return bool(pictures_in({"content": content}))


def pictures_in(message: Message) -> list[dict[str, Any]]:
    """The parts of a message that are pictures, taken in or not."""
    content = message.get("content")
    return [item for item in content if item.get("type") == IMAGE_PART] if isinstance(content, list) else []


def references_in(messages: Sequence[Message]) -> Iterator[Reference]:
    """The references in messages, in order."""
    for message in messages:
        yield from pictures_in(message)


def with_rows_pictures(messages: Sequence[Message], images: Sequence[Image]) -> list[dict[str, Any]]:
    """A row's chat, whose parts of type `image` have no pictures, with references to its pictures.

    Raises:
        BrokenImageError: there are more or fewer places than pictures.
    """
    return fill_places(with_parts([dict(message) for message in messages], len(images)), images)


def fill_places(messages: Sequence[Message], images: Sequence[Image]) -> list[dict[str, Any]]:
    """Messages in which parts of type `image` without a picture have the next one of `images`.

    Raises:
        BrokenImageError: there are too few.
    """
    waiting_images = iter(images)
    filled = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_filled(item, waiting_images) for item in content]
        filled.append({**message, "content": content})
    return filled


def with_data_urls(messages: Sequence[Message], files: Sequence[bytes]) -> list[dict[str, Any]]:
    """A row's chat as OpenAI's clients send it, with the pictures themselves."""
    urls = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in files)
    chat = []
    for message in with_parts([dict(message) for message in messages], len(files)):
        content = [
            item if item["type"] == TEXT_PART else {"type": "image_url", "image_url": {"url": next(urls)}}
            for item in message["content"]
        ]
        chat.append({**message, "content": content})
    return chat


def _filled(item: Any, images: Iterator[Image]) -> Any:
    if item.get("type") != IMAGE_PART or "digest" in item or "picture" in item:
        return item
    image = next(images, None)
    if image is None:
        raise BrokenImageError("a part of type image has no picture, and those of the row are used up")
    return reference_to(image)


def reference_to(image: Image) -> Reference:
    names = ("digest", "num_bytes", "width", "height")
    return {"type": IMAGE_PART, **{name: getattr(image, name) for name in names}}


def size_of(reference: Reference) -> tuple[int, int]:
    """Width and height."""
    return reference["width"], reference["height"]


def image_of(reference: Reference, first: int, num_tokens: int) -> Image:
    """A picture at its place."""
    return Image(
        digest=reference["digest"],
        num_bytes=reference["num_bytes"],
        width=reference["width"],
        height=reference["height"],
        first=first,
        num_tokens=num_tokens,
    )


def joined_parts(parts: Sequence[Mapping[str, Any]], between: str = "") -> str | list[dict[str, Any]]:
    """The content of a message with these parts: texts that follow each other are one, and text alone is a
    string."""
    joined: list[dict[str, Any]] = []
    for item in parts:
        is_text = item["type"] == TEXT_PART
        if is_text and joined and joined[-1]["type"] == TEXT_PART:
            joined[-1] = {"type": TEXT_PART, "text": joined[-1]["text"] + between + item["text"]}
        else:
            joined.append(dict(item))
    if all(item["type"] == TEXT_PART for item in joined):
        return "".join(item["text"] for item in joined)
    return joined
