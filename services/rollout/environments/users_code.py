"""Boundary to users' environments: what they raise becomes a fault, and what they return is checked.

Errors name the place, and what was expected there.
"""

import inspect
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidemill.common.data.image_columns import IMAGE_PART, IMAGE_PARTS, TEXT_PART
from tidemill.common.errors import EnvironmentFaultError, text_of
from tidemill.common.images.pictures import ALPHA_MODES, COMPRESS_LEVEL, DEEP_MODES
from tidemill.common.process.users_code import raised_at
from tidemill.common.wire.codec import pack, sendable
from tidemill.services.rollout.environments.environment import Act, Opening, Row
from tidemill.services.rollout.sessions.picture_parts import joined_parts
from tidemill.services.rollout.sessions.template_chat import content_text

MAX_CHARS = 500
PARTS = (TEXT_PART, *IMAGE_PARTS)
PNG_MODES = ("1", "L", "P", "RGB")
"""Of PIL's modes without transparency, those that a PNG file holds."""
STEP_EXPECTED = (
    "expected (observation, reward, done), or a dict with observation, reward and done; the observation is "
    "text, a list of chat messages, or None"
)


@contextmanager
def contained(where: str, kind: str) -> Iterator[None]:
    """Turn whatever the block raises into an environment's fault, `sys.exit` included."""
    try:
        yield
    except EnvironmentFaultError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFaultError(f"{where} raised {described(error)}", kind) from error


def described(error: BaseException) -> str:
    """An exception in one line, with the place in the code that raised it."""
    where = raised_at(error)
    return f"{type(error).__name__}: {_line(error)}{f' ({where})' if where else ''}"


def complaint(error: BaseException) -> str:
    """The text about a tool that raised, for the model."""
    return sendable(_line(error) or type(error).__name__)


def _line(error: BaseException) -> str:
    return " ".join(text_of(error).split())[:MAX_CHARS]


async def finished(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def call_reset(reset: Callable[..., Any], row: Row) -> Any:
    """Call a `reset` with what it takes: the row's columns by name, or the row."""
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return reset(**row)
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    if len(names) == 1 and names[0] not in row:
        return reset(dict(row))
    return reset(**{name: row[name] for name in names if name in row})


def opening_of(returned: Any, where: str) -> Opening:
    """Read what `reset` returned: nothing, text or blocks for the prompt's end, or a chat in its place."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]  # as in gymnasium, with its info
    if returned is None:
        return Opening()
    if isinstance(returned, str):
        return Opening(added=sendable(returned))
    if _is_list_of_maps(returned):
        if all("role" in message for message in returned):
            return Opening(messages=_messages(returned, where))
        if all(block.get("type") == "text" for block in returned):
            return Opening(added=sendable(content_text(returned)))
    raise EnvironmentFaultError(
        f"{where} returned {_kind(returned)}; expected None, text, a list of text blocks, or a list of chat "
        "messages with role and content (pictures are in parts of their content)",
        "reset",
    )


def act_of(returned: Any, where: str) -> Act:
    """Read what `step` returned: a dict, a tuple of its values in order, or gymnasium's tuple of five."""
    fields = returned
    if isinstance(returned, tuple) and len(returned) in (3, 4):
        fields = dict(zip(("observation", "reward", "done"), returned, strict=False))
    elif isinstance(returned, tuple) and len(returned) == 5:
        observation, reward, is_terminated, is_truncated, _ = returned
        is_done = bool(is_terminated) or bool(is_truncated)
        fields = {"observation": observation, "reward": reward, "done": is_done}
    if not isinstance(fields, Mapping) or not fields.keys() & {"observation", "observations", "done"}:
        raise EnvironmentFaultError(f"{where} returned {_kind(returned)}; {STEP_EXPECTED}", "step")
    messages = observed(fields.get("observation", fields.get("observations")), where)
    reward = number_of(fields.get("reward"), f"{where}: reward is", "step")
    return Act(messages, reward, bool(fields.get("done", False)))


def observed(observation: Any, where: str) -> list[dict[str, Any]]:
    """The messages of an observation; text is a user's."""
    if observation is None or observation == []:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": sendable(observation)}]
    if is_picture(observation) or _are_blocks(observation):
        return [{"role": "user", "content": _content(observation, where)}]
    if isinstance(observation, Mapping) and "role" in observation:
        observation = [observation]
    if _is_list_of_maps(observation) and all("role" in message for message in observation):
        return _messages(observation, where)
    raise EnvironmentFaultError(f"{where}: the observation is {_kind(observation)}; {STEP_EXPECTED}", "step")


def number_of(value: Any, verb: str, kind: str) -> float | None:
    """A reward as a finite number; None stays None."""
    if value is None:
        return None
    if math.isnan(number := _finite(value)):
        raise EnvironmentFaultError(f"{verb} {_kind(value)}; expected a finite number or None", kind)
    return number


def metrics_of(value: Any) -> dict[str, float]:
    """The metrics that are finite numbers; others are dropped, and are no fault."""
    items = value.items() if isinstance(value, Mapping) else ()
    numbers = {sendable(str(name)): _finite(item) for name, item in items}
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def _finite(value: Any) -> float:
    """A number, or a tensor of one; NaN for anything else."""
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one: a tensor of several
        return math.nan
    return number if math.isfinite(number) and not isinstance(value, str) else math.nan


def result_of(returned: Any, where: str) -> str | list[dict[str, Any]]:
    """A tool's result as the model reads it: text unchanged, blocks of text and pictures, else JSON if
    possible."""
    if isinstance(returned, str):
        return sendable(returned)
    if is_picture(returned) or _are_parts(returned):
        return _content(returned, where)
    if isinstance(returned, Mapping | list | tuple):
        try:
            return sendable(json.dumps(returned, default=str, ensure_ascii=False))
        except (TypeError, ValueError):
            pass
    return sendable(str(returned))


def _messages(returned: Any, where: str) -> list[dict[str, Any]]:
    messages = []
    for message in returned:
        content = message.get("content")
        if is_picture(content):
            content = [content]
        if not isinstance(message["role"], str) or not isinstance(content, str | list | None):
            raise EnvironmentFaultError(
                f"{where}: a chat message needs role and content as text, got {_kind(message)}", "step"
            )
        plain = {
            key: sendable(value) if isinstance(value, str) else value
            for key, value in message.items()
            if isinstance(value, str) or key == "tool_calls"
        }
        messages.append(plain | {"content": _content(content, where)})
    try:
        # Here, where the place can still be named: the trajectory is encoded much later.
        pack(messages)
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"{where}: tool_calls of a chat message must be JSON with numbers of 64 bits: {error}"
        raise EnvironmentFaultError(problem, "step") from None
    return messages


def _are_blocks(value: Any) -> bool:
    """Whether it is a list of blocks of text and pictures."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(
        is_picture(item) or (isinstance(item, Mapping) and item.get("type") in PARTS) for item in value
    )


def _are_parts(value: Any) -> bool:
    """Whether a tool's result is a list of blocks, and not of records that have a `type`, too."""
    if not _are_blocks(value):
        return False
    for item in value:
        if is_picture(item) or item["type"] == TEXT_PART:
            continue
        if set(item) - {"type"} not in ({"image"}, {"image_url"}, {"bytes"}):
            return False
    return True


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message: its text, or its parts where a picture is among them."""
    blocks = [content] if is_picture(content) else content
    if not isinstance(blocks, list | tuple):
        return sendable(content_text(blocks))
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if is_picture(block):
            parts.append({"type": IMAGE_PART, "picture": _file_of(block, where)})
        elif isinstance(block, Mapping) and block.get("type") in IMAGE_PARTS:
            parts.append(_picture_part(block, where))
        else:
            parts.append({"type": TEXT_PART, "text": sendable(content_text([block]))})
    return joined_parts(parts)


def _picture_part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part with its picture as bytes or text; without one it takes the next picture of the row."""
    held = [block[key] for key in ("bytes", "image", "image_url", "url") if block.get(key) is not None]
    if not held:
        return {"type": IMAGE_PART}
    picture = held[0].get("url") if isinstance(held[0], Mapping) else held[0]
    if is_picture(picture):
        picture = _file_of(picture, where)
    if not isinstance(picture, bytes | str):
        raise EnvironmentFaultError(
            f"{where}: a part of type image has {_kind(picture)}; expected a PIL picture, the bytes of a "
            "file, or a data: URL",
            "step",
        )
    return {"type": IMAGE_PART, "picture": picture}


def is_picture(value: Any) -> bool:
    """Whether it is one of PIL's. Without an import: who has made one has imported PIL."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _file_of(picture: Any, where: str) -> bytes:
    """The bytes of a file with one of PIL's pictures, upright, without loss. Raises EnvironmentFaultError: it
    cannot be read."""
    from PIL import ImageOps

    file = io.BytesIO()
    with contained(f"{where}: reading a picture", "step"):
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith(DEEP_MODES):
            raise ValueError(f"it has more than 8 bits a channel (mode {upright.mode}); scale it to 8 bits")
        # PNG files have no other modes.
        if upright.mode in ALPHA_MODES:
            upright = upright.convert("RGBA")
        elif upright.mode not in PNG_MODES:
            upright = upright.convert("RGB")
        upright.save(file, "PNG", compress_level=COMPRESS_LEVEL)
    return file.getvalue()


def _is_list_of_maps(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        return "a coroutine (declare the method with `async def`)"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
