"""Messages to bytes and back: msgpack maps, raw array bytes, a schema version beside them.

An entry has two fields: `v`, the schema as `major.minor`, and `p`, the payload. Fields that hold their
default are left out.

Why this layout: a record of 256 + 1,024 tokens is some 9.5 kB, nearly all of it ids and logprobs. As raw
bytes inside the map they are decoded as views, without a copy, so a reader pays for the few control fields
only. The map leaves room for fields of later releases, which a fixed struct would not; leaving out defaults
pays for the names. The version stands beside the payload: it is known before anything is parsed.

Unknown fields of a newer minor are ignored, unless the payload says that it cannot be understood without them
(`needs`); a newer major is refused, because its meaning cannot be known. Nothing is ever unpickled, and every
size is checked before it is allocated.
"""

import codecs
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import Any, TypeVar

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from tidemill.common.errors import CodecError
from tidemill.common.wire.arrays import pack_bits
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Message, Trajectory
from tidemill.common.wire.surrogates import LONE

_ERRORS = "tidemill-lost-characters"
LOST = "\ufffd"


def pack(tree: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The bytes of plain values; `default` turns others into those."""
    try:
        packed: bytes = msgpack.packb(tree, default=default)
    except UnicodeEncodeError:  # rare: the common case pays nothing for it
        packed = msgpack.packb(tree, default=default, unicode_errors=_ERRORS)
    return packed


def sendable(text: str) -> str:
    """The text with every lone surrogate replaced."""
    return LONE.sub(LOST, text)


def _replace(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return LOST.encode() * (error.end - error.start), error.end  # UTF-8 takes only ASCII as text here


codecs.register_error(_ERRORS, _replace)


SCHEMA_MAJOR = 1
SCHEMA = b"1.0"
SCHEMA_WITH_NEEDS = b"1.1"
"""Schema of a message with fields that change the meaning of others."""
NEEDS = "needs"
"""Key of these fields' names in such a payload. A reader that does not know one must refuse the message."""
VERSION_FIELD = b"v"
PAYLOAD_FIELD = b"p"

MAX_ITEMS = 1 << 20
"""Most elements of all lists and maps in a payload: an empty list has 1 byte there, and 60 in memory."""

M = TypeVar("M", bound=Message)


def encode(message: Message) -> dict[bytes, bytes]:
    return {VERSION_FIELD: schema_of(message), PAYLOAD_FIELD: encode_payload(message)}


def schema_of(message: Message) -> bytes:
    return SCHEMA_WITH_NEEDS if _needs(message) else SCHEMA


def _needs(message: Message) -> list[str]:
    if not type(message).changes_meaning:
        return []
    # Absent ones are None, or an empty tuple.
    return [name for name in type(message).changes_meaning if message.__dict__[name] not in (None, ())]


def encode_payload(message: Message) -> bytes:
    """The payload alone, which is field `p` of an entry."""
    values = message.__dict__
    required, optional = _fields(type(message))
    tree = {name: values[name] for name in required}
    for name, default in optional:
        value = values[name]
        # Arrays are always written: comparing one gives an array.
        if value is not default and (isinstance(value, np.ndarray) or value != default):
            tree[name] = value
    needs = _needs(message)
    if needs:
        tree[NEEDS] = needs
    return pack(tree, as_plain)


def payload_of(sample: Trajectory, max_bytes: int | None) -> bytes:
    """The payload of a sample to publish. Raises CodecError: it, or a payload it claims, is too large."""
    payload = encode_payload(sample)
    assert sample.choices is None or not sample.choices.rows, "rows of choices never go through a stream"
    num_bytes = max(len(payload), *(claim.num_bytes for claim in sample.claims), 0)
    if max_bytes is not None and num_bytes > max_bytes:
        raise CodecError(
            f"sample {sample.index} has {num_bytes:,} bytes in {len(sample.segments)} segments, and a "
            f"message at most {max_bytes:,} (streams.max_message_mb)"
        )
    return payload


def decode(fields: Mapping[bytes, bytes], message_type: type[M], max_bytes: int | None = None) -> M:
    """Decode and validate one entry, of at most `max_bytes` where there is a limit.

    Raises:
        CodecError: fields are missing, the schema is of a newer major, the payload is too large, is not
            msgpack, needs what is not understood, or does not validate. The message says which, in one line.
    """
    schema = fields.get(VERSION_FIELD)
    payload = fields.get(PAYLOAD_FIELD)
    if schema is None or payload is None:
        raise CodecError(f"{message_type.kind}: expected fields v and p, got {sorted(fields)[:8]}")
    if schema != SCHEMA:
        _check_schema(schema, message_type)
    if max_bytes is not None and len(payload) > max_bytes:
        raise CodecError(f"{message_type.kind}: {len(payload)} bytes exceed the limit of {max_bytes}")
    try:
        tree = unpack(payload)
    except CodecError as error:
        raise CodecError(f"{message_type.kind}: {error}") from None
    if not isinstance(tree, dict):
        raise CodecError(f"{message_type.kind}: the payload must be a map, got {type(tree).__name__}")
    if NEEDS in tree:
        _check_needs(tree[NEEDS], message_type)
    try:
        return message_type.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(key) for key in first["loc"])
        raise CodecError(f"{message_type.kind}: {where or 'message'}: {first['msg']}") from None
    except (RecursionError, OverflowError, TypeError) as error:
        raise CodecError(f"{message_type.kind}: {error}") from None


def decode_payload(payload: bytes, message_type: type[M]) -> M:
    """Decode a payload of `encode_payload`, of this release or an older one.

    Raises:
        CodecError: as in `decode`.
    """
    return decode({VERSION_FIELD: SCHEMA, PAYLOAD_FIELD: payload}, message_type)


def unpack(payload: bytes) -> Any:
    """The plain values of a payload, not validated, for `decode` and for display.

    Raises:
        CodecError: it is not msgpack.
    """
    # An element takes at least a byte, so a shorter payload cannot hold more: usual messages are not counted.
    counted = {} if len(payload) <= MAX_ITEMS else {"list_hook": _Counter(), "object_hook": _Counter()}
    try:
        return msgpack.unpackb(
            payload,
            **counted,
            strict_map_key=True,
            max_bin_len=len(payload),
            max_str_len=len(payload),
            max_array_len=min(MAX_ITEMS, len(payload)),  # an element takes a byte at least
            max_map_len=min(MAX_ITEMS, len(payload)),
            max_ext_len=0,
        )
    except Exception as error:
        reason = str(error) or type(error).__name__  # a StackError, of deep nesting, has no text
        raise CodecError(f"the payload is not msgpack: {reason}") from None


class _Counter:
    """Counts the elements of lists, or of maps, as they are read."""

    def __init__(self) -> None:
        self._num_items = 0

    def __call__(self, held: Any) -> Any:
        self._num_items += 1 + len(held)
        if self._num_items > MAX_ITEMS:
            raise ValueError(f"it holds more than {MAX_ITEMS:,} elements")
        return held


def _check_schema(schema: bytes, message_type: type[Message]) -> None:
    major, _, minor = schema.partition(b".")
    if len(schema) > 16 or not major.isdigit() or not minor.isdigit():
        raise CodecError(f"{message_type.kind}: schema {schema[:16]!r} must have the form major.minor")
    if int(major) != SCHEMA_MAJOR:
        raise CodecError(
            f"{message_type.kind}: schema {schema.decode()} cannot be read by this version, which reads "
            f"{SCHEMA_MAJOR}.x; update the older side"
        )


def _check_needs(needs: Any, message_type: type[Message]) -> None:
    understood = sorted(message_type.changes_meaning)
    if not isinstance(needs, list) or not all(name in understood for name in needs):
        raise CodecError(
            f"{message_type.kind}: it needs {str(needs)[:80]}, and this version understands {understood}; "
            "update the older side"
        )


@cache
def _fields(message_type: type[Message]) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """Names that are always written, and names that are left out at their default, with it."""
    defaults = {}
    for name, field in message_type.model_fields.items():
        is_constant = field.default_factory is None or field.default_factory in (dict, list, tuple)
        # A default that differs from call to call cannot be compared with.
        defaults[name] = field.get_default(call_default_factory=True) if is_constant else PydanticUndefined
    required = tuple(name for name, default in defaults.items() if default is PydanticUndefined)
    return required, tuple(item for item in defaults.items() if item[0] not in required)


def as_plain(value: Any) -> Any:
    """Convert a value for msgpack: arrays to bytes, models and dataclasses to maps."""
    if isinstance(value, np.ndarray):
        return pack_bits(value) if value.dtype == np.bool_ else np.ascontiguousarray(value).data
    if isinstance(value, BaseModel):
        return value.model_dump(mode="python")
    if isinstance(value, Rows):
        return value.as_plain()
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent; use numbers, text, lists and maps")
