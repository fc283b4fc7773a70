"""Messages as plain values: for JSON, and for people."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.history import Record, StreamName
from common.streams.entries import Garbled
from services.console.text.untrusted import printable, printable_block


def plain_fields(message: BaseModel) -> dict[str, Any]:
    """The fields of a message; inner models become mappings, arrays stay."""
    return {
        name: value.model_dump() if isinstance(value, BaseModel) else value
        for name, value in message.__dict__.items()
        if name in type(message).model_fields
    }


def jsonable(value: Any) -> Any:
    """The value as JSON has it: arrays as lists, bytes in hex, null for numbers that are not finite."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, BaseModel):
        return jsonable(value.model_dump())
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def record_tree(stream: StreamName, record: Record) -> dict[str, Any]:
    """An entry of a stream for programs: all of it."""
    tree: dict[str, Any] = {"stream": stream.value, "id": record.entry_id}
    if isinstance(record, Garbled):
        fields = {name.decode(errors="replace"): value.hex() for name, value in record.fields.items()}
        return tree | {"error": record.error, "fields_hex": fields}
    return tree | {"kind": record.message.kind, "message": jsonable(plain_fields(record.message))}


MAX_SHOWN_ITEMS = 24
"""Elements of an array that are shown; JSON has all."""
MAX_SHOWN_CHARACTERS = 600


def print_values(console: Console, title: str, values: Mapping[str, Any], is_full: bool = False) -> None:
    """A title, and the values under it."""
    console.print(Text(f"\n{title}", "bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True, max_width=24)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(Text(printable(name, 24)), Text(brief(value, is_full)))
    console.print(table)


def brief(value: Any, is_full: bool = False) -> str:
    """A value as text; unless it shall be full, with its first elements only."""
    if isinstance(value, np.ndarray):
        return _items(value.tolist(), len(value) if is_full else MAX_SHOWN_ITEMS)
    if isinstance(value, bytes | bytearray):
        head = bytes(value if is_full else value[:MAX_SHOWN_ITEMS])
        return f"{len(value):,} bytes: {head.hex(' ')}{' ...' if len(head) < len(value) else ''}"
    if is_full:
        return printable_block(value if isinstance(value, str) else repr(value))
    return printable(value if isinstance(value, str) else repr(value), MAX_SHOWN_CHARACTERS)


def _items(values: list[Any], limit: int) -> str:
    items = [f"{item:.5g}" if isinstance(item, float) else str(item) for item in values[:limit]]
    more = [f"... {len(values):,} in all"] if len(values) > limit else []
    return f"[{', '.join([*items, *more])}]"
