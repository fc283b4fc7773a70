"""From a judge's words to a number, or to the reason why there is none: words are never 0 by default."""

import json
import math
import re
from typing import Any, Protocol

from tidemill.common.config.reward_kinds import SCORE, VerdictConfig
from tidemill.services.reward.functions.loading import import_function
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.outcome import AttemptError, RewardOutcome, interpret, users_own
from tidemill.services.reward.remote.faults import FaultKind, RemoteFault

SHOWN_CHARS = 200
# What is no plain number is matched too, without a group, so that no part of it is tried again.
_NUMBER = r"[-+]?(?:\d++(?:,\d++)*+(?:\.\d++)?+|\.\d++)(?:[eE][-+]?\d++)?+%?+"
NUMBER = re.compile(rf"(?<![\w.])(?:({_NUMBER})(?![\w%]|\.\d)|{_NUMBER})")

OBJECT_START = re.compile(r'\{(?=\s*["}])')
MAX_BROKEN = 100
"""Each may have been read to the end of the text."""
LAST_WORD = re.compile(r"(?<!\S)\S+\Z")
CUT = ", and the answer was cut off (max_tokens)"

NONCE = "{nonce}"
"""In a regex or field: the word that the template showed the judge, which no completion can know."""


class VerdictReader(Protocol):
    """Reads a judge's words. `completion` is what it judged: the words may quote it.

    Where `is_cut`, the judge was stopped by `max_tokens`: what touches the end may be a part of more.
    """

    def __call__(
        self, words: str, completion: str = "", nonce: str = "", is_cut: bool = False
    ) -> RewardOutcome:
        """The verdict; its value is None where the function that reads it says so."""
        ...


def make_verdict(config: VerdictConfig) -> VerdictReader:
    """The reader that the config describes. What it raises is a `RemoteFault` of kind `no_verdict`.

    Raises:
        ConfigError: `function` cannot be loaded.
    """
    read = _function_reader(config) if config.function else _reader(config)

    def verdict(words: str, completion: str = "", nonce: str = "", is_cut: bool = False) -> RewardOutcome:
        outcome = read(words, completion, nonce, is_cut)
        if outcome.value is None:
            return outcome
        return RewardOutcome(_in_range(config, outcome.value, words), outcome.components, outcome.detail)

    return verdict


class Reading:
    """Reads verdicts as a scoring process calls functions: a user's regex or function may take for ever.

    A request has the words, the nonce and `is_cut` beside the sample that was judged.
    """

    is_async = False

    def __init__(self, name: str, config: VerdictConfig) -> None:
        self.name, self._config, self._verdict = name, config, make_verdict(config)

    @property
    def is_cheap(self) -> bool:
        """Whether nothing of the user's runs."""
        return not (self._config.regex or self._config.function)

    def spec(self) -> dict[str, Any]:
        """What another process needs to load the same."""
        config = self._config.model_dump_json()
        return {"maker": f"{__name__}:{load_reading.__name__}", "reference": self.name, "config": config}

    def call(self, request: Request) -> list[RewardOutcome]:
        """The verdict. Raises RemoteFault: there is none."""
        return [self._verdict(completion=request.samples[0].solution_str, **request.given)]

    async def call_async(self, request: Request) -> list[RewardOutcome]:
        return self.call(request)


def load_reading(reference: str, config: str) -> Reading:
    return Reading(reference, VerdictConfig.model_validate_json(config))


def unread(words: str, error: AttemptError) -> RemoteFault:
    """The fault where reading a verdict in another process came to `error`."""
    if error.kind == FaultKind.NO_VERDICT:
        return RemoteFault(FaultKind.NO_VERDICT, str(error))
    return _none(words, f"reading it: {error}")


def _reader(config: VerdictConfig) -> VerdictReader:
    def read(words: str, completion: str = "", nonce: str = "", is_cut: bool = False) -> RewardOutcome:
        is_all = not config.regex and not config.json_field
        if config.regex:
            found: Any = _matched(config.regex.replace(NONCE, nonce), words, completion, is_cut)
        elif config.json_field:
            found = _field(config.json_field.replace(NONCE, nonce), words, completion)
        else:
            found = LAST_WORD.sub("", words) if is_cut else words
        value = _chosen(config.choices, found, is_all) if config.choices else _number(found, is_all)
        if value is None or not math.isfinite(value):
            wanted = f"one of {', '.join(config.choices)}" if config.choices else "one finite number"
            raise _none(
                words, f"where {wanted} should be stands {str(found)[:SHOWN_CHARS]!r}{CUT if is_cut else ''}"
            )
        return RewardOutcome(value)

    return read


def _function_reader(config: VerdictConfig) -> VerdictReader:
    function = import_function(config.function, "judge.verdict.function", ())

    def read(words: str, completion: str = "", nonce: str = "", is_cut: bool = False) -> RewardOutcome:
        try:
            with users_own():
                return interpret(function(words))
        except AttemptError as error:
            raise _none(words, str(error)) from error

    return read


def _matched(regex: str, words: str, completion: str, is_cut: bool) -> str:
    pattern = re.compile(regex)
    group: int | str = SCORE if SCORE in pattern.groupindex else min(1, pattern.groups)
    found = list(pattern.finditer(words))
    if found and is_cut and found[-1].end() == len(words):
        raise _none(words, f"the last match of {regex!r} touches the end{CUT}")
    matches = [(match[0], match[group] or "") for match in found]
    if not matches:
        raise _none(words, f"nothing matches {regex!r}{CUT if is_cut else ''}")
    return str(_own(matches, words, completion))


def _own(found: list[tuple[str, Any]], words: str, completion: str) -> Any:
    """The judge's conclusion: the last of its own, for it thinks first and concludes last.

    What stands in the completion as well, word for word, may be a quotation, by which a completion could
    give itself a verdict. Where there is nothing else, all of them must agree.
    """
    own = [value for text, value in found if text.strip() not in completion]
    if own:
        return own[-1]
    values = [value for _, value in found]
    if any(value != values[0] for value in values):
        raise _none(words, "several verdicts stand there, all of which stand in the completion as well")
    return values[0]


def _field(path: str, words: str, completion: str) -> Any:
    objects = [(text, value) for text, tree in _objects(words) if (value := _at(tree, path)) is not _ABSENT]
    if not objects:
        raise _none(words, f"there is no JSON object with the field {path!r}")
    return _own(objects, words, completion)


_ABSENT = object()


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree


def _objects(words: str) -> list[tuple[str, Any]]:
    """The JSON objects in the text, whatever is around them: how they are spelled, and what they are."""
    decoder, found, position, num_broken = json.JSONDecoder(), [], 0, 0
    while start := OBJECT_START.search(words, position):
        try:
            tree, position = decoder.raw_decode(words, start.start())
            found.append((words[start.start() : position], tree))
        except (ValueError, RecursionError):
            position, num_broken = start.end(), num_broken + 1
        if num_broken > MAX_BROKEN:
            raise _none(words, f"more than {MAX_BROKEN} JSON objects in it are broken")
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
    numbers = {_parsed(match[1]) for match in NUMBER.finditer(found) if match[1]}
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
