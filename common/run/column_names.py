"""Which columns of a row are its prompt and its truth: by usual names, or as `data.columns` says."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.common.errors import ConfigError

PROMPTS = ("prompt", "messages", "question", "problem")
"""The first of these that a row has holds its prompt, where `data.columns` names none."""
TRUTHS = ("reward_model.ground_truth", "ground_truth", "solution", "answer")
"""The first of these that a row has is its truth."""
MAX_SHOWN_COLUMNS = 20


def renamed(columns: Mapping[str, Any], names: Mapping[Any, str], origin: str) -> dict[str, Any]:
    """The columns, and those that `names` maps (ours to theirs) under our names too: an environment's `reset`
    takes a row as it was. `a.b` is `b` inside of `a`.

    Raises:
        ConfigError: a column that is named is not there.
    """
    result = dict(columns)
    for name, theirs in names.items():
        value: Any = columns
        # A name with a dot may be that of a column, too.
        for part in [theirs] if theirs in columns else theirs.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise missing(origin, f"column {theirs!r} (data.columns: {{{name}: {theirs}}})", columns, ())
            value = value[part]
        if name == "ground_truth":
            result.pop("reward_model", None)
        result[name] = value
    return result


def prompt_column_of(columns: Mapping[str, Any]) -> str:
    """The column with the prompt; `prompt` where there is none."""
    return next((name for name in PROMPTS if columns.get(name) is not None), PROMPTS[0])


def missing(
    origin: str, what: str, columns: Mapping[str, Any], accepted: Iterable[str] = (*PROMPTS, *TRUTHS)
) -> ConfigError:
    """The error for a row without `what`: its columns, the nearest of them, and every name that is known."""
    names = [repr(name) for name in columns]
    shown = ", ".join(names[:MAX_SHOWN_COLUMNS]) or "none"
    more = f" and {len(names) - MAX_SHOWN_COLUMNS} more" if len(names) > MAX_SHOWN_COLUMNS else ""
    known = list(accepted)
    near = [
        f"{name!r} looks like {close[0]!r}"
        for name in columns
        if name not in known and (close := difflib.get_close_matches(name.lower(), known, 1, 0.7))
    ]
    hint = f" {'; '.join(near[:3])}." if near else ""
    return ConfigError(
        f"{origin}: {what} is missing; the columns are {shown}{more}.{hint} A prompt is looked for in "
        f"{', '.join(PROMPTS)}; a truth in {', '.join(TRUTHS)}. Other names: data.columns, such as "
        "{prompt: instruction, ground_truth: meta.label}."
    )
