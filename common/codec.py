"""Messages to bytes and back: msgpack maps, raw array bytes, a schema version beside them.

An entry has two fields: `v`, the schema as `major.minor`, and `p`, the payload. Fields that hold their
default are left out. Unknown fields of a newer minor are ignored; a newer major is refused, because its
meaning cannot be known. Nothing is ever unpickled, and every size is checked before it is allocated.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError

from common.arrays import pack_bits
from common.errors import CodecError
from common.messages import Message

SCHEMA_MAJOR = 1
SCHEMA = b"1.0"
VERSION_FIELD = b"v"
PAYLOAD_FIELD = b"p"

MAX_PAYLOAD_BYTES = 64 << 20
"""Default bound on one payload; `streams.max_message_mb` overrides it."""
MAX_ITEMS = 1 << 20
"""Most elements of any list or map inside a payload."""

M = TypeVar("M", bound=Message)


def encode(message: Message) -> dict[bytes, bytes]:
    """The fields of a stream entry for `message`."""
    return {VERSION_FIELD: SCHEMA, PAYLOAD_FIELD: encode_payload(message)}


def encode_payload(message: Message) -> bytes:
    """The payload alone: what every script and reader takes as `p`."""
    values = message.__dict__
    payload: bytes = msgpack.packb(
        {name: values[name] for name, default in _fields(type(message)) if _is_set(values[name], default)},
        default=_plain,
    )
    return payload


def decode(fields: Mapping[bytes, bytes], message_type: type[M], max_bytes: int = MAX_PAYLOAD_BYTES) -> M:
    """Decode and validate one entry.

    Raises:
        CodecError: fields are missing, the schema is of a newer major, the payload is too large, is not
            msgpack, or does not validate. The message says which, in one line.
    """
    schema, payload = fields.get(VERSION_FIELD), fields.get(PAYLOAD_FIELD)
    if schema is None or payload is None:
        raise CodecError(f"{message_type.kind}: expected fields v and p, got {sorted(fields)[:8]}")
    _check_schema(schema, message_type)
    if len(payload) > max_bytes:
        raise CodecError(f"{message_type.kind}: {len(payload)} bytes exceed the limit of {max_bytes}")
    try:
        tree = msgpack.unpackb(
            payload,
            strict_map_key=True,
            max_bin_len=max_bytes,
            max_str_len=max_bytes,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except Exception as error:
        raise CodecError(f"{message_type.kind}: the payload is not msgpack: {error}") from None
    if not isinstance(tree, dict):
        raise CodecError(f"{message_type.kind}: the payload must be a map, got {type(tree).__name__}")
    try:
        return message_type.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CodecError(f"{message_type.kind}: {where or 'message'}: {first['msg']}") from None
    except (RecursionError, OverflowError, TypeError) as error:
        raise CodecError(f"{message_type.kind}: {error}") from None


def _check_schema(schema: bytes, message_type: type[Message]) -> None:
    major, _, minor = schema.partition(b".")
    if len(schema) > 16 or not major.isdigit() or not minor.isdigit():
        raise CodecError(f"{message_type.kind}: schema {schema[:16]!r} must have the form major.minor")
    if int(major) != SCHEMA_MAJOR:
        raise CodecError(
            f"{message_type.kind}: schema {schema.decode()} cannot be read by this version, which reads "
            f"{SCHEMA_MAJOR}.x; update the older side"
        )


@cache
def _fields(message_type: type[Message]) -> tuple[tuple[str, Any], ...]:
    """Name and default of each field; a field without a plain default has itself as a sentinel."""
    return tuple((name, field.default) for name, field in message_type.model_fields.items())


def _is_set(value: Any, default: Any) -> bool:
    """Whether a field differs from its default; arrays are always written."""
    if isinstance(value, np.ndarray):
        return True
    if value is None or isinstance(value, dict | tuple | list):
        return bool(value)
    return bool(value != default)


def _plain(value: Any) -> Any:
    """What msgpack does not know by itself."""
    if isinstance(value, np.ndarray):
        return pack_bits(value) if value.dtype == np.bool_ else value.tobytes()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="python")
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent; use numbers, text, lists and maps")
