"""The rows of a run's datasets, with errors that name file, line and columns; files are in `data_files.py`.

Known columns: verl's `prompt` (text, or a list of chat messages), `data_source`, `reward_model.ground_truth`,
`extra_info`; GSM8K's `question`, and `answer` ending in `#### <number>`; the usual names in `PROMPTS` and
`TRUTHS`; and others as `data.columns` maps them. All other columns go to `extra`, where reward functions find
them, and so does a prompt that is a chat. A `Row` from this module is complete, and holds only what a message
can carry.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.common.data.data_files import files_of, folder_of, open_rows
from tidemill.common.data.row_file import Located, RowFile, in_words
from tidemill.common.errors import ConfigError
from tidemill.common.images.no_pictures import NO_SECTION, check_no_pictures
from tidemill.common.wire.surrogates import REMEDY, find_halves

if TYPE_CHECKING:
    from tidemill.common.config.data import DataConfig
    from tidemill.common.config.sources import SourceConfig
    from tidemill.common.data.image_columns import PictureColumns
    from tidemill.common.images.sources import ImageSource

PROMPT = "prompt"
"""The column with the prompt; also the key in `extra` of a prompt that is a chat."""
PROMPTS = (PROMPT, "messages", "question", "problem")
"""The first of these that a row has holds its prompt, where `data.columns` names none."""
TRUTHS = ("reward_model.ground_truth", "ground_truth", "solution", "answer")
"""The first of these that a row has is its ground truth."""
GSM8K_SOURCE = "openai/gsm8k"
"""verl's `data_source` for GSM8K."""
MAX_SHOWN_COLUMNS = 20

ChatMessage = dict[str, Any]
"""A chat message: `role` and `content`, both text, or a content of parts (`image_columns`); other keys go to
the chat template unchanged."""

_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)\s*$")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset: `number` counts over all files from 0, `origin` names it in messages, and
    `source` is the name of the set where the run has several. `completion` is that of a demonstration: text,
    the messages after the prompt, or columns with ids (`demonstration.py`). `images` are its pictures by the
    order of their places.

    Example: `prompt` "2+2=", `data_source` "arith", `ground_truth` "4", `extra` {}, `number` 0, `origin`
    "train.jsonl line 1".
    """

    prompt: str | list[ChatMessage]
    data_source: str
    ground_truth: Any
    extra: dict[str, Any]
    number: int
    origin: str
    source: str = ""
    completion: str | list[ChatMessage] | dict[str, Any] | None = None
    images: "tuple[ImageSource, ...]" = ()


Opener = Callable[[str, bool], Iterable[Located]]
"""Opens the rows of a path; the second argument asks for a `RowFile`."""


def read_training_rows(
    data: "DataConfig",
    sources: "Sequence[SourceConfig] | None" = None,
    opener_of: "Callable[[SourceConfig], Opener]" = lambda _: open_rows,
) -> dict[str, Sequence[Row]]:
    """The training rows by name of their source, for all sources of the config or for `sources`; without
    sources, the rows of `data.train` under the name "". `opener_of` makes the opener of a source.

    Raises:
        ConfigError: as `read_rows`.
    """
    if data.sources:
        return {
            source.name: read_rows(
                source.path, data.of_source(source), data.max_rows, source, data.stream, opener_of(source)
            )
            for source in (data.sources if sources is None else sources)
        }
    return {"": read_rows(data.train_files, data, data.max_rows, is_streamed=data.stream)}


def read_evaluation_rows(data: "DataConfig", max_rows: int | None = None) -> dict[str, Sequence[Row]]:
    """The rows of each evaluation set by its name, at most the first `max_rows` of each. Where training has
    sources, `source` of a row is its set's name. Raises ConfigError: as `read_rows`."""
    sets = {name: read_rows(path, data, max_rows) for name, path in data.eval.items()}
    if not data.sources:
        return sets
    named: dict[str, Sequence[Row]] = {}
    for name, rows in sets.items():
        named[name] = [replace(row, source=name) for row in rows]
    return named


def read_rows(
    paths: str | Path | Sequence[str | Path],
    data: "DataConfig",
    max_rows: int | None = None,
    source: "SourceConfig | None" = None,
    is_streamed: bool = False,
    opener: Opener = open_rows,
) -> Sequence[Row]:
    """The rows of one file or several, in order, under the names of `data.columns`.

    Args:
        paths: files, patterns, datasets of the hub, or rows of Python code.
        data: names columns, and says whether a row needs a ground truth; otherwise a missing one is null.
        max_rows: number of rows to read, from the beginning.
        source: the source that the rows belong to.
        is_streamed: whether rows stay on disk and are read on access.
        opener: opens the rows of a path.

    Raises:
        ConfigError: a file is missing, empty, of an unknown kind or damaged, or a row lacks something. The
            message names the file and the line (JSONL, from 1) or the row (Parquet, from 0). For a row that
            is streamed, it is raised on access.
    """

    def parse(located: Located, number: int, folder: Path) -> Row:
        if source is not None and source.is_imitated:
            from tidemill.common.data.demonstration import parse_demonstration

            return _of_source(parse_demonstration(located, number, data.columns), source)
        pictures = _open_pictures(folder) if data.has_images else None
        row = parse_row(located, number, data.columns, data.needs_truth, pictures)
        return _of_source(row, source)

    rows: list[Row] = []
    files: list[RowFile] = []
    folders: list[Path] = []
    for path in files_of(paths):
        folder = folder_of(path)
        try:
            opened = opener(path, is_streamed)
            num_before = len(rows)
            if isinstance(opened, RowFile) and is_streamed:
                files.append(opened)
                folders.append(folder)
                is_empty = not len(opened)
            else:
                for located in opened:
                    if max_rows is not None and len(rows) >= max_rows:
                        return rows
                    rows.append(parse(located, len(rows), folder))
                is_empty = len(rows) == num_before
        except OSError as error:
            raise ConfigError(f"cannot read dataset {path}: {error.strerror or error}.") from None
        if is_empty:
            raise ConfigError(f"dataset {path} has no rows; give a file with at least one.")
    if not is_streamed:
        return rows
    from tidemill.common.data.streamed_rows import StreamedRows

    return StreamedRows(files, folders, parse, max_rows)


def _open_pictures(folder: Path) -> "PictureColumns":
    # A run of text imports nothing of it.
    from tidemill.common.data.image_columns import PictureColumns

    return PictureColumns(folder)


def _of_source(row: Row, source: "SourceConfig | None") -> Row:
    if source is None:
        return row
    name = row.data_source or source.data_source or source.name
    chosen = {"environment": source.environment} if source.environment else {}
    return replace(row, source=source.name, data_source=name, extra=chosen | row.extra)


def gsm8k_answer(answer: str) -> str | None:
    """The number after the last `####` of a GSM8K answer, without commas; None where there is none.

    >>> gsm8k_answer("1,000 + 80 = 1,080. #### 1,080")
    '1080'
    """
    match = _FINAL_ANSWER.search(answer)
    return match[1].replace(",", "") if match else None


def parse_row(
    located: Located,
    number: int,
    names: Mapping[Any, str],
    needs_truth: bool,
    pictures: "PictureColumns | None" = None,
) -> Row:
    """Make a row from its columns.

    Args:
        located: origin and columns.
        number: number of the row.
        names: `data.columns`.
        needs_truth: whether a row without a ground truth is refused.
        pictures: reads the pictures of a row; None where the run has none.

    Raises:
        ConfigError: it lacks something, or has pictures in a run without.
    """
    origin = located[0]
    columns = renamed(located[1], names, located[0])
    check_text(columns, origin)
    if pictures is None:
        check_no_pictures(columns, origin, NO_SECTION)
    column = next((name for name in PROMPTS if columns.get(name) is not None), PROMPT)
    if columns.get(column) is None:
        raise no_prompt(origin, columns, names)
    prompt, pictures_in_parts = parse_prompt(columns[column], column, origin, pictures)
    reserved = {column, "data_source", "reward_model", "ground_truth", "extra_info"}
    images: tuple[ImageSource, ...] = ()
    if pictures is not None:
        images = pictures.of_row(columns, pictures_in_parts)
        # Never in `extra`, which goes through Redis.
        reserved |= pictures.names(columns, names)
    if _is_gsm8k(columns, column):
        columns |= {"data_source": GSM8K_SOURCE, "ground_truth": _final_answer(columns["answer"], origin)}
        reserved.discard("question")
    source = columns.get("data_source")
    info = columns.get("extra_info")
    if source is not None and not isinstance(source, str):
        raise wrong_value(origin, "data_source", "text", source)
    if info is not None and not isinstance(info, dict):
        raise wrong_value(origin, "extra_info", "an object", info)
    others = {name: value for name, value in columns.items() if name not in reserved and value is not None}
    if column != PROMPT and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        # Data for fine-tuning: the last message is an answer, not the beginning of one.
        answer = prompt[-1]["content"]
        columns = {"answer": pictures.text_of(answer) if pictures else answer} | columns
        prompt = prompt[:-1]
        if not prompt:
            raise wrong_value(origin, column, "a chat with a question before the answer", columns[column])
    truth = _sendable(_find_ground_truth(columns, origin, needs_truth), origin, "ground_truth")
    if isinstance(truth, float) and not math.isfinite(truth):
        raise ConfigError(
            f"{origin}: the ground truth is {truth}, which no answer equals; expected a finite number, text, "
            "or null where the reward needs none."
        )
    # Reward functions may need the chat itself; the model reads its rendered text.
    chat = {PROMPT: prompt} if isinstance(prompt, list) else {}
    extra = _sendable({**others, **(info or {}), **chat}, origin, "extra_info")
    return Row(prompt, source or "", truth, extra, number, origin, images=images)


def check_text(columns: Mapping[str, Any], origin: str) -> None:
    """Raises ConfigError: a text of the row cannot be encoded."""
    half = next(find_halves(columns, ""), None)
    if half:
        raise ConfigError(f"{origin}: {half}; {REMEDY}.")


def _is_gsm8k(columns: Mapping[str, Any], column: str) -> bool:
    """Whether a row has GSM8K's layout. A plain `answer` (without `####`) is the ground truth itself."""
    has_truth = columns.get("reward_model") is not None or "ground_truth" in columns
    has_answer = isinstance(columns.get("answer"), str) and "####" in columns["answer"]
    return has_answer and not has_truth and columns[column] == columns.get("question")


def _final_answer(answer: str, origin: str) -> str:
    number = gsm8k_answer(answer)
    if number is None:
        raise ConfigError(
            f"{origin}: column 'answer' must end in '#### <number>' (GSM8K), got the end {answer[-40:]!r}."
        )
    return number


def parse_prompt(
    prompt: Any, column: str, origin: str, pictures: "PictureColumns | None" = None
) -> "tuple[str | list[ChatMessage], list[ImageSource | None]]":
    """The prompt, and the picture of each part of type `image` in it: None where it is in another column."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{origin}: column {column!r} is empty; expected the text of a prompt.")
        return prompt, []
    if not isinstance(prompt, list) or not prompt:
        raise wrong_value(origin, column, "text or a list of chat messages", prompt)
    messages = []
    sources: list[ImageSource | None] = []
    for position, message in enumerate(prompt):
        where = f"{column}[{position}]"
        if not isinstance(message, dict):
            raise wrong_value(origin, where, "an object with role and content", message)
        # Parquet adds nulls for keys that only other messages have.
        parsed = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if isinstance(content, list) and content:
            if pictures is None:
                wrong = wrong_value(origin, f"{where}.content", "text", content)
                raise ConfigError(f"{wrong} Pictures need the section `images`.")
            parsed["content"], of_message = pictures.parse_parts(content, f"{origin}: {where}")
            sources += of_message
        elif not isinstance(content, str):
            raise wrong_value(origin, f"{where}.content", "text", content)
        if not isinstance(message.get("role"), str):
            raise wrong_value(origin, f"{where}.role", "text", message.get("role"))
        messages.append(parsed)
    return messages, sources


def _find_ground_truth(columns: Mapping[str, Any], origin: str, needs_truth: bool) -> Any:
    """The first of `TRUTHS` that the row has. Null is allowed; absence only where no reward needs a truth."""
    model = columns.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return model["ground_truth"]
    if not isinstance(model, dict | None) and "ground_truth" not in columns:
        raise wrong_value(origin, "reward_model", "an object with ground_truth", model)
    for name in TRUTHS:
        if name in columns:
            return columns[name]
    if needs_truth:
        is_null = model is None and "reward_model" in columns
        where_null = "reward_model is null; " if is_null else ""
        subject = f"the truth, {TRUTHS[0]!r} ({where_null}write null where the reward needs none),"
        raise missing_column(origin, subject, columns)
    return None


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


def renamed(columns: Mapping[str, Any], names: Mapping[Any, str], origin: str) -> dict[str, Any]:
    """The columns, with those that `names` maps (our name -> the dataset's) also under our names: the
    original ones stay for an environment's `reset`. `a.b` is `b` inside of `a`.

    Raises:
        ConfigError: a column that is named is missing.
    """
    result = dict(columns)
    for name, theirs in names.items():
        value: Any = columns
        # A column's own name may contain a dot.
        keys = [theirs] if theirs in columns else theirs.split(".")
        for depth, key in enumerate(keys):
            if value is None:
                outer = ".".join(keys[:depth])
                raise null_column(origin, [outer], f"{theirs!r} (data.columns) is read from it")
            if not isinstance(value, Mapping) or key not in value:
                raise missing_column(
                    origin, f"column {theirs!r} (data.columns: {{{name}: {theirs}}})", columns, ()
                )
            value = value[key]
        if name == "ground_truth":
            result.pop("reward_model", None)
        result[name] = value
    return result


def wrong_value(origin: str, where: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(f"{origin}: {where} must be {expected}, got {in_words(value)}.")


def no_prompt(
    origin: str,
    columns: Mapping[str, Any],
    names: Mapping[Any, str],
    accepted: Iterable[str] = (*PROMPTS, *TRUTHS),
) -> ConfigError:
    """The error for a row without a prompt: no column is one, or those that are have nulls. `names` is
    `data.columns`."""
    nulls = [names.get(name, name) for name in PROMPTS if name in columns]
    if not nulls:
        return missing_column(origin, f"column {PROMPT!r} (the prompt)", columns, accepted)
    return null_column(origin, nulls, "a prompt is text or a list of chat messages")


def null_column(origin: str, columns: Iterable[str], expected: str) -> ConfigError:
    """The error for a row that has null in these columns, one of which it needs."""
    names = [repr(name) for name in dict.fromkeys(columns)]
    subject = f"column {names[0]} is null" if len(names) == 1 else f"columns {' and '.join(names)} are null"
    return ConfigError(f"{origin}: {subject}, and {expected}; fill it in, or leave the row out of the data.")


def missing_column(
    origin: str, subject: str, columns: Mapping[str, Any], accepted: Iterable[str] = (*PROMPTS, *TRUTHS)
) -> ConfigError:
    """The error for a row without `subject`; it shows the columns, similar names, and all known names."""
    names = [repr(name) for name in columns]
    listed = ", ".join(names[:MAX_SHOWN_COLUMNS]) or "none"
    more = f" and {len(names) - MAX_SHOWN_COLUMNS} more" if len(names) > MAX_SHOWN_COLUMNS else ""
    accepted_names = list(accepted)
    near = []
    for name in columns:
        close = difflib.get_close_matches(name.lower(), accepted_names, 1, 0.7)
        if close and name not in accepted_names:
            near.append(f"{name!r} looks like {close[0]!r}")
    hint = f" {'; '.join(near[:3])}." if near else ""
    return ConfigError(
        f"{origin}: {subject} is missing; the columns are {listed}{more}.{hint} A prompt is looked for in "
        f"{', '.join(PROMPTS)}; a truth in {', '.join(TRUTHS)}. Other names: data.columns, such as "
        "{prompt: instruction, ground_truth: meta.label}."
    )
