"""From a judge's words to a number, or to the reason why there is none: words are never 0 by default."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from common.config.judge import SCORE, VerdictConfig
from services.reward.functions import import_function
from services.reward.outcome import AttemptError, Outcome, contained, interpret
from services.reward.remote.faults import FaultKind, RemoteFault

SHOWN_CHARS = 200
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?%?(?![\w%]|\.\d)")

Verdict = Callable[[str], Outcome]


def make_verdict(config: VerdictConfig) -> Verdict:
    """The reader that the config describes. What it raises is a `RemoteFault` of kind `no_verdict`.

    Raises:
        ConfigError: `function` cannot be loaded.
    """
    read = _function_reader(config) if config.function else _reader(config)

    def verdict(words: str) -> Outcome:
        outcome = read(words)
        if outcome.value is None:
            return outcome
        return Outcome(_in_range(config, outcome.value, words), outcome.components, outcome.detail)

    return verdict


def _reader(config: VerdictConfig) -> Verdict:
    pattern = re.compile(config.regex) if config.regex else None

    def read(words: str) -> Outcome:
        is_all = pattern is None and not config.json_field
        if pattern is not None:
            found: Any = _matched(pattern, words)
        else:
            found = _field(config.json_field, words) if config.json_field else words
        value = _chosen(config.choices, found, is_all) if config.choices else _number(found, is_all)
        if value is None or not math.isfinite(value):
            wanted = f"one of {', '.join(config.choices)}" if config.choices else "one finite number"
            raise _none(words, f"where {wanted} should be stands {str(found)[:SHOWN_CHARS]!r}")
        return Outcome(value)

    return read


def _function_reader(config: VerdictConfig) -> Verdict:
    function = import_function(config.function, "judge.verdict.function", ())

    def read(words: str) -> Outcome:
        try:
            with contained():
                return interpret(function(words))
        except AttemptError as error:
            raise _none(words, str(error)) from error

    return read


def _matched(pattern: re.Pattern[str], words: str) -> str:
    matches = list(pattern.finditer(words))
    if not matches:
        raise _none(words, f"nothing matches {pattern.pattern!r}")
    last = matches[-1]  # a judge thinks first and concludes last
    group: int | str = SCORE if SCORE in pattern.groupindex else min(1, pattern.groups)
    return last[group] or ""


def _field(path: str, words: str) -> Any:
    found = _last_object(words)
    for part in path.split("."):
        if not isinstance(found, dict) or part not in found:
            raise _none(words, f"there is no JSON object with the field {path!r}")
        found = found[part]
    return found


def _last_object(words: str) -> Any:
    """The last JSON object that stands in the text, whatever is around it."""
    decoder, found, position = json.JSONDecoder(), None, 0
    while (position := words.find("{", position)) >= 0:
        try:
            found, position = decoder.raw_decode(words, position)
        except (ValueError, RecursionError):
            position += 1
    return found


def _chosen(choices: dict[str, float], found: Any, is_all: bool) -> float | None:
    """The value of the choice; of a whole text, the only one that stands in it as a word."""
    folded = {label.strip().casefold(): value for label, value in choices.items()}
    text = str(found).strip().casefold()
    if text in folded:
        return folded[text]
    if not is_all:
        return None
    values = {
        value for label, value in folded.items() if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)
    }
    return values.pop() if len(values) == 1 else None


def _number(found: Any, is_all: bool) -> float | None:
    """The number; of a whole text, the only one that stands in it."""
    if isinstance(found, bool):
        return float(found)
    if isinstance(found, int | float):
        return float(found)
    if not isinstance(found, str):
        return None
    numbers = {_parsed(match[0]) for match in NUMBER.finditer(found)}
    is_plain = NUMBER.fullmatch(found.strip()) is not None
    return numbers.pop() if len(numbers) == 1 and (is_all or is_plain) else None


def _parsed(text: str) -> float:
    number = float(text.rstrip("%").replace(",", ""))
    return number / 100 if text.endswith("%") else number


def _in_range(config: VerdictConfig, value: float, words: str) -> float:
    if config.range is None:
        return value
    low, high = config.range
    if not low <= value <= high:
        raise _none(words, f"{value:g} is outside the range from {low:g} to {high:g}")
    return (value - low) / (high - low) if config.to_unit else value


def _none(words: str, reason: str) -> RemoteFault:
    return RemoteFault(FaultKind.NO_VERDICT, f"no verdict: {reason}; the judge said {words[-SHOWN_CHARS:]!r}")
