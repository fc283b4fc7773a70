"""A row that is trained as it is: its prompt, and the completion that is imitated."""

from collections.abc import Mapping
from typing import Any

from tidemill.common.data.dataset import (
    PROMPT,
    PROMPTS,
    Row,
    check_text,
    missing_column,
    no_prompt,
    null_column,
    parse_prompt,
    renamed,
    wrong_value,
)
from tidemill.common.data.row_file import Located
from tidemill.common.images.no_pictures import NOT_IMITATED, check_no_pictures

COMPLETIONS = ("completion", "response", "answer")
"""The first of these that a demonstration has is its completion, unless it is a chat that holds it."""
IDS = ("prompt_ids", "completion_ids")
"""Columns of a tokenized demonstration; `loss_mask` may say which completion tokens are trained."""


def parse_demonstration(located: Located, number: int, names: Mapping[Any, str]) -> Row:
    """Make a demonstration from its columns: a chat that ends with the assistant, or a prompt and a
    completion, both as text or as messages, or ids. Raises ConfigError: it lacks something."""
    origin = located[0]
    columns = renamed(located[1], names, located[0])
    check_text(columns, origin)
    source = columns.get("data_source") or ""
    if not isinstance(source, str):
        raise wrong_value(origin, "data_source", "text", source)
    if columns.get(IDS[1]) is not None:
        return Row(str(columns.get(PROMPT) or ""), source, None, {}, number, origin, completion=columns)
    column = next((name for name in PROMPTS if columns.get(name) is not None), PROMPT)
    if columns.get(column) is None and IDS[1] in columns:
        raise null_column(origin, [IDS[1]], "a row of ids is imitated from it")
    if columns.get(column) is None:
        raise no_prompt(origin, columns, names, (*PROMPTS, *COMPLETIONS))
    check_no_pictures(columns, origin, NOT_IMITATED)
    prompt, _ = parse_prompt(columns[column], column, origin)
    completion_columns = [name for name in COMPLETIONS if columns.get(name) is not None]
    if completion_columns:
        completion, _ = parse_prompt(columns[completion_columns[0]], completion_columns[0], origin)
    elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        # The completion starts with the assistant's first message.
        first = next(index for index, message in enumerate(prompt) if message["role"] == "assistant")
        completion = prompt[first:]
        prompt = prompt[:first]
    elif any(name in columns for name in COMPLETIONS):
        nulls = [names.get(name, name) for name in COMPLETIONS if name in columns]
        raise null_column(origin, nulls, "a completion is what is imitated")
    else:
        subject = (
            f"column {COMPLETIONS[0]!r} (what is imitated; or an assistant's message at the end of a chat)"
        )
        raise missing_column(origin, subject, columns, (*PROMPTS, *COMPLETIONS))
    if not prompt:
        raise wrong_value(origin, column, "a chat with a question before the answer", columns[column])
    if isinstance(completion, list) and completion[-1]["role"] != "assistant":
        raise wrong_value(
            origin,
            completion_columns[0],
            "messages of which the last is the assistant's",
            completion[-1]["role"],
        )
    return Row(prompt, source, None, {}, number, origin, completion=completion)
