"""Reads prompts from files, with errors that name file, line and columns; `data_files.py` knows the kinds of
files, `hub_datasets.py` opens what the package datasets has to, rows of `streamed_rows.py` stay on the disk.

verl's columns are known: `prompt` (a string or a list of chat messages), `data_source`,
`reward_model.ground_truth`, `extra_info`; GSM8K's: `question`, and `answer` ending in `#### <number>`; and
the names in `column_names.py`. Columns that are none of them travel in `extra`, where reward functions find
them, and so does a prompt that is a chat. A `Row` that leaves this module is complete, and holds only what a
message can carry.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.run.column_names import TRUTHS, missing, prompt_column_of, renamed
from tidemill.common.run.data_files import (
    BYTE_ORDER_MARK,
    JSONL,
    TABLES,
    files_of,
    is_document,
    read_document,
    read_table,
    suffix_of,
)
from tidemill.common.run.hub_datasets import is_hub_dataset, open_hub_dataset
from tidemill.common.run.users_rows import is_users_rows, read_users_rows

GSM8K_SOURCE = "openai/gsm8k"
"""verl's `data_source` for GSM8K."""

PROMPT = "prompt"
"""The column with the prompt; and where `extra` keeps the prompt of a row that is a chat."""

ChatMessage = dict[str, Any]
"""`role` and `content`, both text; what else a message holds goes to the chat template as it is."""

NO_NAMES: Mapping[str, str] = {}
_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)\s*$")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset: `number` counts over all files from 0, `origin` names it to people, and `source`
    is the name of the set where the run has several."""

    prompt: str | list[ChatMessage]
    data_source: str
    ground_truth: Any
    extra: dict[str, Any]
    number: int
    origin: str
    source: str = ""


def read_dataset(
    paths: str | Path | Sequence[str | Path],
    max_rows: int | None = None,
    names: Mapping[Any, str] = NO_NAMES,
    needs_truth: bool = True,
) -> list[Row]:
    """Read all rows of one file or several, in order; only the first `max_rows` where that is given.
    `names` is `data.columns`; without `needs_truth` a row that has none has null.

    Raises:
        ConfigError: a file is missing, empty, of an unknown kind or damaged, or a row lacks something. The
            message names the file and the line (JSONL, from 1) or the row (Parquet, from 0).
    """
    files = files_of(paths)
    rows: list[Row] = []
    for file in files:
        num_before = len(rows)
        for origin, columns in _read_columns(file):
            if max_rows is not None and len(rows) >= max_rows:
                return rows
            rows.append(parse_row(columns, len(rows), origin, names, needs_truth))
        if len(rows) == num_before:
            raise ConfigError(f"dataset {file} has no rows; give a file with at least one.")
    return rows


def gsm8k_answer(answer: str) -> str | None:
    """The number after the last `####` of a GSM8K answer, without commas; None where there is none.

    >>> gsm8k_answer("1,000 + 80 = 1,080. #### 1,080")
    '1080'
    """
    found = _FINAL_ANSWER.search(answer)
    return found[1].replace(",", "") if found else None


def _read_columns(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(origin, columns)` for each row of a file."""
    if is_hub_dataset(str(file)):
        yield from _read_table(str(file))
        return
    if is_users_rows(str(file)):
        yield from read_users_rows(str(file))
        return
    suffix = suffix_of(file)
    reader = read_table if suffix in TABLES else _read_jsonl if suffix in JSONL else _read_parquet
    try:
        yield from (read_document if is_document(file) else reader)(file)
    except OSError as error:
        raise ConfigError(f"cannot read dataset {file}: {error.strerror or error}.") from None


def _read_table(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    table = open_hub_dataset(path)
    for number in range(len(table)):
        yield f"{path} row {number}", dict(table[number])


def _read_jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                yield jsonl_columns(file, number, line)


def jsonl_columns(file: Path, number: int, line: bytes) -> tuple[str, dict[str, Any]]:
    """Where a line stands, and its columns. Raises ConfigError: it is no JSON object."""
    origin = f"{file} line {number}"
    # Some Windows tools put a byte order mark before the first line.
    return origin, _parse_line(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, origin)


def _parse_line(line: bytes, origin: str) -> dict[str, Any]:
    try:
        columns = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} is not UTF-8 text (byte {error.start + 1} of the line).") from None
    except (json.JSONDecodeError, RecursionError) as error:
        where = (
            f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
        )
        hint = " The file looks like one JSON document." if line.strip() in (b"[", b"{") else ""
        raise ConfigError(
            f"{origin} is not valid JSON: {where}.{hint} Expected one JSON object on each line."
        ) from None
    if not isinstance(columns, dict):
        raise ConfigError(
            f"{origin} holds {_kind(columns)}; expected a JSON object with columns, one on each line."
        )
    return columns


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    yield f"{file} row {number}", columns
                    number += 1
    except pyarrow.ArrowException as error:
        raise ConfigError(f"dataset {file} is not a whole Parquet file: {error}") from None


def parse_row(
    columns: dict[str, Any],
    number: int,
    origin: str,
    names: Mapping[Any, str] = NO_NAMES,
    needs_truth: bool = True,
) -> Row:
    """A row of its columns. Raises ConfigError: it lacks something."""
    if names.get("prompt", prompt_column_of(columns)) == "question" and _has_gsm8k_answer(columns):
        return _parse_gsm8k(columns, number, origin)
    columns = renamed(columns, names, origin) if names else columns
    column = prompt_column_of(columns)
    if columns.get(column) is None:
        raise missing(origin, f"column {column!r} (the prompt)", columns)
    prompt = _parse_prompt(columns[column], column, origin)
    source = columns.get("data_source")
    if source is not None and not isinstance(source, str):
        raise _wrong(origin, "data_source", "text", source)
    info = columns.get("extra_info")
    if info is not None and not isinstance(info, dict):
        raise _wrong(origin, "extra_info", "an object", info)
    known = {column, "data_source", "reward_model", "ground_truth", "extra_info"}
    others = {name: value for name, value in columns.items() if name not in known and value is not None}
    if column != PROMPT and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        # Data for fine-tuning: the last message is an answer, not the beginning of one.
        columns = {"answer": prompt[-1]["content"]} | columns
        prompt = prompt[:-1]
        if not prompt:
            raise _wrong(origin, column, "a chat with a question before the answer", columns[column])
    ground_truth = _find_ground_truth(columns, origin, needs_truth)
    # Reward functions may want the chat itself; the text that the model reads is templated.
    chat = {PROMPT: prompt} if isinstance(prompt, list) else {}
    extra = _sendable({**others, **(info or {}), **chat}, origin, "extra_info")
    return Row(prompt, source or "", _sendable(ground_truth, origin, "ground_truth"), extra, number, origin)


def _has_gsm8k_answer(columns: Mapping[str, Any]) -> bool:
    """GSM8K's own layout. A plain `answer` is not: it is the truth as it stands."""
    has_truth = columns.get("reward_model") is not None or "ground_truth" in columns
    return "####" in str(columns.get("answer")) and not has_truth


def _parse_gsm8k(columns: dict[str, Any], number: int, origin: str) -> Row:
    question, answer = columns["question"], columns["answer"]
    for name in ("question", "answer"):
        if not isinstance(columns[name], str):
            raise _wrong(origin, name, "text", columns[name])
    if not question.strip():
        raise ConfigError(f"{origin}: column 'question' is empty; expected the text of a prompt.")
    ground_truth = gsm8k_answer(answer)
    if ground_truth is None:
        raise ConfigError(
            f"{origin}: column 'answer' must end in '#### <number>' (GSM8K), got the end {answer[-40:]!r}."
        )
    extra = _sendable({name: value for name, value in columns.items() if value is not None}, origin, "row")
    return Row(question, GSM8K_SOURCE, ground_truth, extra, number, origin)


def _parse_prompt(prompt: Any, column: str, origin: str) -> str | list[ChatMessage]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{origin}: column {column!r} is empty; expected the text of a prompt.")
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(origin, column, "text or a list of chat messages", prompt)
    messages = []
    for position, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise _wrong(origin, f"{column}[{position}]", "an object with role and content", message)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise _wrong(origin, f"{column}[{position}].{key}", "text", message.get(key))
        # Parquet fills what other messages have and this one has not with nulls.
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def _find_ground_truth(columns: Mapping[str, Any], origin: str, needs_truth: bool) -> Any:
    """The first of `TRUTHS` that is there. Null is allowed, absence only where no reward needs one."""
    model = columns.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return model["ground_truth"]
    if "ground_truth" in columns:
        return columns["ground_truth"]
    if model is not None and not isinstance(model, dict):
        raise _wrong(origin, "reward_model", "an object with ground_truth", model)
    if found := [name for name in TRUTHS if name in columns]:
        return columns[found[0]]
    if not needs_truth:
        return None
    raise missing(origin, f"the truth, {TRUTHS[0]!r} (write null where the reward needs none),", columns)


def _sendable(value: Any, origin: str, where: str) -> Any:
    """The value as plain numbers, text, lists and maps with text keys, as messages need them."""
    if isinstance(value, dict):
        return {str(key): _sendable(item, origin, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sendable(item, origin, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(f"{origin}: {where} holds {value}, more than 64 bits; write it as text.")
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    raise ConfigError(
        f"{origin}: {where} is of type {type(value).__name__}; use numbers, text, lists and objects."
    )


def _wrong(origin: str, where: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(f"{origin}: {where} must be {expected}, got {_kind(value)}.")


def _kind(value: Any) -> str:
    """What a value is, in words for people, with the value where it is short."""
    if value is None:
        return "null"
    number = "a number"
    names = {bool: "a boolean", int: number, float: number, str: "text", list: "a list", dict: "an object"}
    text = repr(value)
    return f"{names.get(type(value), type(value).__name__)} {text if len(text) <= 40 else text[:37] + '...'}"
