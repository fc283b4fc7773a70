"""Dead letters on a terminal and as JSON. Whatever they hold is shown, and nothing of it takes effect.

Text from a letter was written by whoever wrote the message: markup is not interpreted, and characters that a
terminal would act on, or that change the order of reading, are shown as escapes.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.console.dead.dead_letters import Letter
from services.console.records.tables import print_values
from services.console.text.formats import sample_name, when
from services.console.text.tables import listing, name_table
from services.console.text.untrusted import printable
from services.console.text.values import jsonable, plain_fields

ERROR_CHARACTERS = 60
HEX_ROW_BYTES = 16
HEX_FIRST_BYTES = 512
"""Bytes of an undecodable field that are shown unless all are asked for."""


def list_table(letters: Sequence[Letter]) -> Table:
    """One line for each letter."""
    titles = ("id", "when", "stream", "sample", "error", "attempts", "worker")
    table = listing(titles, folds=("error", "worker"))
    for letter in letters:
        content = letter.content
        cells = (
            letter.letter_id,
            when(letter.died_at),
            printable(content.origin, 40),
            sample_name(*letter.key),
            printable(content.error, ERROR_CHARACTERS),
            str(content.attempts),
            printable(content.worker, 40),
        )
        table.add_row(*map(Text, cells))
    return table


def print_letter(console: Console, letter: Letter, with_hex: bool) -> None:
    """Every field of a letter, then the message that died, or its bytes."""
    content = letter.content
    table = name_table("bold", indent=0)
    rows = [
        ("letter", letter.letter_id),
        ("died", when(letter.died_at)),
        ("stream", content.origin),
        ("entry", content.entry_id or "(made by the trainer)"),
        ("sample", sample_name(*letter.key)),
        ("error", content.error),
        ("attempts", str(content.attempts)),
        ("worker", content.worker),
        ("size", f"{letter.num_bytes:,} bytes"),
    ]
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    console.print(table)
    if letter.message is not None:
        print_values(console, f"{letter.message.kind}, decoded", plain_fields(letter.message))
    else:
        console.print(Text(f"\ncannot be decoded: {printable(letter.problem)}", "yellow"))
        if letter.claims:
            print_values(console, "what its bytes say, not validated", letter.claims)
    if with_hex or letter.message is None:
        for name, data in content.fields.items():
            _print_hex(console, name, data, None if with_hex else HEX_FIRST_BYTES)


def as_tree(letter: Letter, with_content: bool = False) -> dict[str, Any]:
    """A letter for programs; `with_content` adds the bytes and the decoded message."""
    content = letter.content
    ticket, index = letter.key
    tree: dict[str, Any] = {
        "id": letter.letter_id,
        "died_at": letter.died_at,
        "stream": content.origin,
        "entry_id": content.entry_id,
        "ticket": ticket,
        "index": index,
        "error": content.error,
        "attempts": content.attempts,
        "worker": content.worker,
        "num_bytes": letter.num_bytes,
    }
    if with_content:
        tree["fields_hex"] = {name: value.hex() for name, value in content.fields.items()}
        tree["message"] = jsonable(plain_fields(letter.message)) if letter.message is not None else None
        tree["problem"] = letter.problem
        tree["unvalidated"] = jsonable(letter.claims)
    return tree


def _print_hex(console: Console, name: str, value: bytes, limit: int | None) -> None:
    shown = value[:limit] if limit else value
    console.print(Text(f"\nfield {printable(name, 40)}, {len(value):,} bytes", "bold"))
    for start in range(0, len(shown), HEX_ROW_BYTES):
        row = shown[start : start + HEX_ROW_BYTES]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        text = f"  {start:08x}  {row.hex(' '):<{3 * HEX_ROW_BYTES}} {characters}"
        console.print(Text(text), soft_wrap=True)
    if len(shown) < len(value):
        console.print(Text(f"  ... {len(value) - len(shown):,} more bytes; --hex shows all", "dim"))
