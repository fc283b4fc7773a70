"""Pictures in the messages of a request to a server, in OpenAI's form: `image_url` with a data URL.

The messages are made as texts first, with a mark for each picture: a random word, so that nothing in a row or
a completion is taken for one. Then each mark becomes the picture.
"""

import base64
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.common.data.image_columns import MARK
from tidemill.common.errors import BrokenImageError
from tidemill.common.wire.images import PICTURES_FAULT
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.pictures import PICTURES_KIND, PictureReader
from tidemill.services.reward.sample import ChatMessages, RewardSample

MARK_BYTES = 8


def mark_pictures(sample: RewardSample) -> tuple[RewardSample, list[str]]:
    """The sample with a mark in place of each picture of its prompt, and these marks in their order.

    Raises:
        AttemptError: its prompt has more or fewer places than pictures.
    """
    images = sample.trajectory.prompt_images
    if not images:
        return sample, []
    marks = [f"<image-{secrets.token_hex(MARK_BYTES)}>" for _ in images]
    try:
        return sample.with_marks(marks), marks
    except BrokenImageError as error:
        raise AttemptError(f"{PICTURES_FAULT}{error}", is_final=True, kind=PICTURES_KIND) from error


async def put_pictures(
    messages: ChatMessages, marks: Sequence[str], sample: RewardSample, reader: PictureReader
) -> tuple[ChatMessages, int]:
    """The messages with the sample's pictures in place of the marks, and about how many tokens these are.

    Servers take no picture in a message of the system: there `<image>` takes a mark's place. Pictures are
    read only where there is a mark.

    Raises:
        AttemptError: a picture is missing or damaged.
    """
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    if not any(mark in text for mark in marks for text in texts):
        return messages, 0
    png_by_mark = dict(zip(marks, await reader.read(sample), strict=True))
    # Those of the policy's model: the server's may make others of them.
    num_tokens = sum(image.num_tokens for image in sample.trajectory.prompt_images)
    return [{**message, "content": _content_of(message, png_by_mark)} for message in messages], num_tokens


def _content_of(message: dict[str, Any], png_by_mark: Mapping[str, bytes]) -> Any:
    """The content of a message with the pictures of its marks: text, or texts and pictures in their order.

    Example: "What is <image-5a...>?" becomes a text, an `image_url` and a text.
    """
    text = message.get("content")
    if not isinstance(text, str):
        return text
    any_mark = "|".join(map(re.escape, png_by_mark))
    # With a group, so that the marks are among the pieces.
    pieces = re.split(f"({any_mark})", text)
    if message.get("role") == "system":
        return "".join(MARK if piece in png_by_mark else piece for piece in pieces)
    if len(pieces) == 1:
        return text
    blocks: list[dict[str, Any]] = []
    for piece in pieces:
        if piece in png_by_mark:
            address = f"data:image/png;base64,{base64.b64encode(png_by_mark[piece]).decode()}"
            blocks.append({"type": "image_url", "image_url": {"url": address}})
        elif piece:
            blocks.append({"type": "text", "text": piece})
    return blocks
