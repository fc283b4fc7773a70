"""A reward that asks a language model for its verdict, in OpenAI's API.

One attempt: fill in the template, ask within the run's limits, read a number from the judge's words. Words
without a number are a failed attempt, never a 0; so is a regex that matches only a part of a number. A number
that may be quoted from the completion counts only if there is no other. Thoughts (`<think>`) are not read.
The words are kept in the score's detail; tokens are always counted.
"""

import contextlib
import json
import math
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any

from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import SCORE, JudgeConfig, VerdictConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.codec import sendable
from tidemill.services.reward.functions.pool import Execution
from tidemill.services.reward.functions.request import Callee, Request
from tidemill.services.reward.functions.reward_function import import_function
from tidemill.services.reward.outcome import (
    MAX_DETAIL_CHARS,
    AttemptError,
    Reward,
    RewardOutcome,
    interpret,
    users_own,
)
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import CHARS_PER_TOKEN, FaultKind, RemoteFault
from tidemill.services.reward.remote.picture_parts import mark_pictures, put_pictures
from tidemill.services.reward.remote.servers import usage_of
from tidemill.services.reward.remote.templates import SampleTemplate
from tidemill.services.reward.sample import ChatMessages, RewardSample, lines_of

SHOWN_CHARS = 200
_SIGN = "\u2212-"
_DASH = f"\u2010-\u2015~\uff5e{_SIGN}"
_GROUPING = "_'\u2019\u00a0\u00b4\u066c\u2007\u2009\u202f"
_POINTS = "\u00b7\u066b\uff0c\uff0e\u70b9\u9ede"
"""Decimal points of other scripts, and a comma that may be one."""
_SLASHES = "/\u00f7\u2044\u2215\uff0f"
_FRACTIONS = "\u00bc-\u00be\u2150-\u215e"
_MARKUP = "[*_`\u00ad\u200b\u2060]{0,3}"
"""What may stand within a number and is no part of it: emphasis, characters without width."""
_POWERS = " (?:thousand|million|billion)\\b"
# Other forms of numbers are matched too, without a group, so that no part of them is tried again. A comma
# groups thousands: `8,5` is not 85.
_WHOLE = r"\d{1,3}+(?:,\d{3})++|\d++"
_NUMBER = rf"[+{_SIGN}]?(?:(?:{_WHOLE})(?:\.\d++)?+|\.\d++)(?:[eE][+{_SIGN}]?\d++)?+%?+"
_ANY_NUMBER = rf"[+{_SIGN}]?(?:\d++(?:[,{_GROUPING}]\d++)*+(?:\.\d++)?+|\.\d++)(?:[eE][+{_SIGN}]?\d++)?+%?+"
_MORE = rf"[\w%]|[.,{_GROUPING}]\d|\.\.+\d| ?[{_FRACTIONS}]|{_POWERS}"
NUMBER = re.compile(rf"(?<![\w.])(?:({_NUMBER})(?!{_MORE})|{_ANY_NUMBER})")
_JOINTS = rf".,:^*x\u00d7{_POINTS}{_GROUPING}"
_CUT_BEFORE = re.compile(
    rf"(?:\d{_MARKUP}[{_JOINTS}{_SLASHES}{_DASH}]?{_MARKUP}|\d(?:\.\.+|\u2026)|\d(?:\{{,\}}|\\,)"
    rf"|\d[eE][+{_SIGN}]?|(?<!\w)\.|(?<!\w)[\u2013{_SIGN}])\Z"
)
"""What stands before a part of a number: further digits, a decimal point, a sign."""
_CUT_SIGNS = ("+", "-", "\u2212")
_CUT_BEFORE_SIGN = re.compile(r"\d[eE]?\Z")
_CUT_AFTER = re.compile(
    rf"{_MARKUP}[{_JOINTS}]?{_MARKUP}\d|(?:\{{,\}}|\\,)\d|[eE][+{_SIGN}]?\d| \d{{3}}(?!\d)| \d+/\d"
    rf"|[\u00b2\u00b3\u00b9\u2070-\u2079]| ?[{_FRACTIONS}]|[kKM](?!\w)|{_POWERS}"
)
_NOT_THE_WHOLE = re.compile(
    rf"{_MARKUP}\s{{0,3}}[{_SLASHES}]\s{{0,3}}{_MARKUP}\d"
    rf"|{_MARKUP}(?:[{_DASH}]|\.\.+|\u2026)\d| [{_DASH}] \d[\d.]*(?!\s*\w)| (?:or|to|through) \d"
)
"""A fraction or range. A regex may match what follows its number, and so say that it counts for nothing."""
_CONTEXT_CHARS = 12
THOUGHT_START = "<think>"
THOUGHT_END = "</think>"

OBJECT_START = re.compile(r'\{(?=\s*["}])')
MAX_BROKEN = 100
"""Most broken JSON objects in one text: each may cost a read to its end."""
LAST_WORD = re.compile(r"(?<!\S)\S+\Z")
CUT = ", and the answer was cut off (max_tokens)"

FUNCTION_FIELD = "judge.verdict.function"
NONCE = "{nonce}"
"""Placeholder in a regex or field for the random word that the template showed only to the judge."""


class Verdict(Callee):
    """Reads the verdicts of one judge. A user's regex or function runs in a scoring process, because it may
    never end. A request has the words, the nonce and `is_cut` beside the judged sample.

    Raises:
        ConfigError: `function` cannot be loaded.
    """

    is_async = False

    def __init__(self, name: str, config: VerdictConfig) -> None:
        self.name = name
        self._config = config
        self.is_cheap = not (config.regex or config.function)
        self._function = import_function(config.function, FUNCTION_FIELD) if config.function else None

    def spec(self) -> dict[str, Any]:
        config = self._config.model_dump_json()
        return {"maker": f"{__name__}:load_verdict", "reference": self.name, "config": config}

    async def call(self, request: Request) -> list[RewardOutcome]:
        judged = request.samples[0].trajectory
        # A judge may read the thought, too, and quote a verdict from that.
        written = f"{judged.thought}\n{judged.text}" if judged.thought else judged.text
        return [self.read(completion=written, **request.arguments)]

    def read(self, words: str, completion: str = "", nonce: str = "", is_cut: bool = False) -> RewardOutcome:
        """The verdict; its value is None where the function that reads it says so.

        Args:
            words: The judge's answer.
            completion: The judged completion, which the words may quote.
            nonce: The word that replaces `{nonce}` in a regex or field.
            is_cut: Whether `max_tokens` ended the answer: a value at its end may be incomplete.

        Raises:
            RemoteFault: there is no verdict.
        """
        if self._function is None:
            outcome = RewardOutcome(self._value(_without_thought(words), completion, nonce, is_cut))
        else:
            try:
                with users_own():
                    outcome = interpret(self._function(words))
            except AttemptError as error:
                raise _none(words, str(error)) from error
        if outcome.value is not None and self._config.range is not None:
            low, high = self._config.range
            if not low <= outcome.value <= high:
                raise _none(words, f"{outcome.value:g} is outside the range from {low:g} to {high:g}")
            if self._config.to_unit:
                outcome.value = (outcome.value - low) / (high - low)
        return outcome

    def _value(self, words: str, completion: str, nonce: str, is_cut: bool) -> float:
        config = self._config
        is_all = not config.regex and not config.json_field
        if config.regex:
            verdict: Any = _matched(config.regex.replace(NONCE, nonce), words, completion, is_cut)
        elif config.json_field:
            verdict = _field(config.json_field.replace(NONCE, nonce), words, completion)
        else:
            verdict = LAST_WORD.sub("", words) if is_cut else words
        value = _chosen(config.choices, verdict, is_all) if config.choices else _number(verdict, is_all)
        if value is None or not math.isfinite(value):
            wanted = f"one of {', '.join(config.choices)}" if config.choices else "one finite number"
            cut = CUT if is_cut else ""
            raise _none(words, f"where {wanted} should be stands {str(verdict)[:SHOWN_CHARS]!r}{cut}")
        return value


def load_verdict(reference: str, config: str) -> Verdict:
    return Verdict(reference, VerdictConfig.model_validate_json(config))


def unread(words: str, error: AttemptError) -> RemoteFault:
    """The fault for an `error` of reading a verdict in a scoring process."""
    if error.kind == FaultKind.NO_VERDICT:
        return RemoteFault(FaultKind.NO_VERDICT, str(error))
    return _none(words, f"reading it: {error}")


def _without_thought(words: str) -> str:
    """What follows the thought that the words begin with. A later `<think>` may be a quotation, and stays."""
    if not words.lstrip().startswith(THOUGHT_START):
        return words
    _, end, answer = words.partition(THOUGHT_END)
    if not end:
        raise _none(words, "the answer ends within its thought (raise max_tokens)")
    return answer


@dataclass(frozen=True, slots=True)
class _Captured:
    """What a regex matched as the verdict. `cut_from`: the text around it, if it is a part of a number."""

    text: str
    cut_from: str = ""


def _matched(regex: str, words: str, completion: str, is_cut: bool) -> str:
    pattern = re.compile(regex)
    group: int | str = SCORE if SCORE in pattern.groupindex else min(1, pattern.groups)
    matches = list(pattern.finditer(words))
    if matches and is_cut and matches[-1].end() == len(words):
        raise _none(words, f"the last match of {regex!r} touches the end{CUT}")
    if not matches:
        raise _none(words, f"nothing matches {regex!r}{CUT if is_cut else ''}")
    captured = [(match[0], _captured(match, group)) for match in matches]
    verdict: _Captured = _conclusion(captured, words, completion)
    if verdict.cut_from:
        raise _none(
            words,
            f"{regex!r} matches {verdict.text!r}, only a part of the number in {verdict.cut_from!r}; "
            r"let the regex match all of it, as (-?\d+(?:\.\d+)?) does, or ask the judge for whole numbers",
        )
    return verdict.text


def _captured(match: re.Match[str], group: int | str) -> _Captured:
    start = match.start(group)
    end = match.end(group)
    text = match[group] or ""
    words = match.string
    # A window: the search is anchored at its end, and would be tried from each character of a long text.
    before = words[max(0, start - 8) : start]
    is_cut_before = False
    if text[:1].isdigit() or text[:1] == ".":
        is_cut_before = _CUT_BEFORE.search(before) is not None
    elif text[:1] in _CUT_SIGNS:
        is_cut_before = _CUT_BEFORE_SIGN.search(before) is not None
    is_cut_after = text[-1:].isdigit() and (
        _CUT_AFTER.match(words, end) is not None
        or (match.end() == end and _NOT_THE_WHOLE.match(words, end) is not None)
    )
    if not (is_cut_before or is_cut_after):
        return _Captured(text)
    return _Captured(text, words[max(0, start - _CONTEXT_CHARS) : end + _CONTEXT_CHARS])


def _conclusion(verdicts: list[tuple[str, Any]], words: str, completion: str) -> Any:
    """The judge's conclusion: the last value that is its own, because judges reason first.

    A match that also stands in the completion, word for word, may be a quotation, with which a completion
    could give itself a verdict. If there are no others, all of them must agree.
    """
    judges_own = [value for text, value in verdicts if text.strip() not in completion]
    if judges_own:
        return judges_own[-1]
    values = [value for _, value in verdicts]
    if any(value != values[0] for value in values):
        raise _none(words, "several verdicts stand there, all of which stand in the completion as well")
    return values[0]


def _field(path: str, words: str, completion: str) -> Any:
    objects = []
    for text, tree in _objects(words):
        with contextlib.suppress(LookupError, TypeError):  # it has no such field
            value: Any = tree
            for name in path.split("."):
                value = value[name]
            objects.append((text, value))
    if not objects:
        raise _none(words, f"there is no JSON object with the field {path!r}")
    return _conclusion(objects, words, completion)


def _objects(words: str) -> list[tuple[str, Any]]:
    """Source text and value of each JSON object in the text."""
    decoder = json.JSONDecoder()
    texts_and_trees = []
    position = 0
    num_broken = 0
    while start := OBJECT_START.search(words, position):
        try:
            tree, position = decoder.raw_decode(words, start.start())
            texts_and_trees.append((words[start.start() : position], tree))
        except (ValueError, RecursionError):
            position = start.end()
            num_broken += 1
        if num_broken > MAX_BROKEN:
            raise _none(words, f"more than {MAX_BROKEN} JSON objects in it are broken")
    return texts_and_trees


def _chosen(choices: dict[str, float], verdict: Any, is_all: bool) -> float | None:
    """The value of the choice that `verdict` is; with `is_all`, of those among its words, if they agree."""
    folded = {label.strip().casefold(): value for label, value in choices.items()}
    text = str(verdict).strip().casefold()
    if text in folded or not is_all:
        return folded.get(text)
    values = {
        value for label, value in folded.items() if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)
    }
    return values.pop() if len(values) == 1 else None


def _number(verdict: Any, is_all: bool) -> float | None:
    """The number that `verdict` is; with `is_all`, the one that it contains, if all in it are equal."""
    if isinstance(verdict, int | float):
        return float(verdict)
    if not isinstance(verdict, str):
        return None
    numbers = {_parsed(match[1]) for match in NUMBER.finditer(verdict) if match[1]}
    is_plain = NUMBER.fullmatch(verdict.strip()) is not None
    return numbers.pop() if len(numbers) == 1 and (is_all or is_plain) else None


def _parsed(text: str) -> float:
    number = float(text.rstrip("%").replace(",", "").replace("\u2212", "-"))
    return number / 100 if text.endswith("%") else number


def _none(words: str, reason: str) -> RemoteFault:
    return RemoteFault(FaultKind.NO_VERDICT, f"no verdict: {reason}; the judge said {words[-SHOWN_CHARS:]!r}")


NONCE_BYTES = 4
REGEX_PROCESSES = 2
"""Two: one reads while the other is busy with a slow expression."""


class JudgePrompt:
    def __init__(self, name: str, config: JudgeConfig) -> None:
        where = f"reward.rewards.{name}.judge"
        self._user = SampleTemplate(config.template, f"{where}.template")
        self._system = SampleTemplate(config.system, f"{where}.system") if config.system else None

    def messages(self, sample: RewardSample, nonce: str = "") -> ChatMessages:
        """What the judge reads about a sample, as a chat; the user's message comes last.

        Raises:
            AttemptError: a template asks for something that the sample does not have.
        """
        system = self._system.render(sample, nonce) if self._system else ""
        user = {"role": "user", "content": self._user.render(sample, nonce)}
        return [{"role": "system", "content": system}, user] if self._system else [user]


def read_answer(answer: dict[str, Any], api: str) -> tuple[str, int, bool]:
    """The words of a judge, tokens of prompt and answer together, and whether `max_tokens` ended the answer.

    Raises:
        ValueError: the answer holds no text, or not in the right place.
    """
    choice = answer["choices"][0]
    words = choice["text"] if api == "completions" else choice["message"].get("content")
    if words is None:
        words = ""  # a model that said nothing, or refused: no verdict, but an answer
    if not isinstance(words, str):
        raise ValueError(f"choices[0] holds {type(words).__name__} in place of text")
    return sendable(words), sum(usage_of(answer)), choice.get("finish_reason") == "length"


class JudgeReward(Reward):
    def __init__(self, name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> None:
        assert config.judge is not None
        self.config = config.judge
        self._timeout_s = config.timeout_s
        self.servers = dependencies.servers(config.servers)
        self._pictures = dependencies.pictures
        self._prompt = JudgePrompt(name, config.judge)
        section = dependencies.config.reward
        verdict = config.judge.verdict
        most = section.processes if verdict.function else min(section.processes, REGEX_PROCESSES)
        self._reading = Execution(Verdict(name, verdict), most, section.threads)

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """One attempt. Raises AttemptError: no verdict; mostly a `RemoteFault`."""
        # New for each attempt: no completion can know it.
        nonce = secrets.token_hex(NONCE_BYTES)
        messages, num_prompt_tokens = await self._messages(sample, nonce)
        started = time.monotonic()
        body: dict[str, Any] = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        is_chat = self.config.api == "chat"
        body |= {"messages": messages} if is_chat else {"prompt": messages[-1]["content"]}
        words, num_tokens, is_cut = await self.servers.ask_json(
            "chat/completions" if is_chat else "completions",
            body | self.config.extra_body,
            lambda answer: read_answer(answer, self.config.api),
            lane=sample.lane,
            tokens=num_prompt_tokens + self.config.max_tokens,
            timeout_s=self._timeout_s,
        )
        arguments = {"words": words, "nonce": nonce, "is_cut": is_cut}
        try:  # a user's regex or function reads it in a scoring process, within `timeout_s`
            (outcome,) = await self._reading.run(Request([sample], arguments), self._timeout_s)
        except AttemptError as error:
            fault = unread(words, error)
            self.servers.count(fault)
            raise fault from None
        detail = {
            "judgement": words[:MAX_DETAIL_CHARS],
            "judge_tokens": num_tokens,
            "judge_s": round(time.monotonic() - started, 3),
        }
        return RewardOutcome(outcome.value, outcome.components, {**outcome.detail, **detail})

    async def _messages(self, sample: RewardSample, nonce: str) -> tuple[ChatMessages, int]:
        """What the judge reads, with the pictures in their places, and about how many tokens that is."""
        if self._pictures is None:
            messages = self._prompt.messages(sample, nonce)
            return messages, _num_tokens(messages)
        marked, marks = mark_pictures(sample)
        texts = self._prompt.messages(marked, nonce)
        messages, num_picture_tokens = await put_pictures(texts, marks, sample, self._pictures)
        return messages, _num_tokens(texts) + num_picture_tokens

    async def close(self) -> None:
        """End the processes that read verdicts; the dependencies close the servers."""
        await self._reading.close()


def _num_tokens(messages: ChatMessages) -> int:
    return sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN


def check_judge(name: str, config: NamedRewardConfig, _: bool = False) -> None:
    """Find what is wrong with a judge without asking it.

    Raises:
        ConfigError: a template is invalid, or does not show the completion, or the nonce that the verdict
            uses; or the verdict's function cannot be loaded.
    """
    judge = config.judge
    assert judge is not None
    JudgePrompt(name, judge)
    Verdict(name, judge.verdict)
    parsed = [ImmutableSandboxedEnvironment().parse(text) for text in (judge.template, judge.system)]
    variables = {name for tree in parsed for name in find_undeclared_variables(tree)}
    where = f"reward.rewards.{name}.judge.template"
    if "completion" not in variables:
        raise ConfigError(
            f"{where} does not show the judge the completion: put {{{{ completion }}}} where it should be"
        )
    if NONCE in judge.verdict.regex + judge.verdict.json_field and "nonce" not in variables:
        raise ConfigError(
            f"{where} does not show the nonce by which the verdict is read: ask in it for a line such as "
            f"'Score {{{{ nonce }}}}: N', or take {NONCE} out of the verdict"
        )


def judge_reading(name: str, config: NamedRewardConfig, sample: RewardSample, _: ServersConfig) -> str:
    """What the judge reads about a sample. Raises AttemptError: the template cannot be filled in."""
    assert config.judge is not None
    messages = JudgePrompt(name, config.judge).messages(sample)
    return lines_of(messages) if config.judge.api == "chat" else str(messages[-1]["content"])
