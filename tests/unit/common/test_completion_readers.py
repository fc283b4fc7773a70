"""What reads a model's text takes time in proportion to the text, whatever the text is, and never fails."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from types import FrameType
from typing import Any

import pytest

from tidemill.common.config.reward_kinds import VerdictConfig
from tidemill.common.wire import codec
from tidemill.services.console.web import texts
from tidemill.services.reward.builtin import exact_match, gsm8k, math_text
from tidemill.services.reward.remote.faults import RemoteFault
from tidemill.services.reward.remote.judge import Verdict
from tidemill.services.reward.rewards.sandbox import extract_code
from tidemill.services.rollout.gateway.dialogue import identity
from tidemill.services.rollout.sessions.calls import MAX_DEPTH, find_calls, read_call
from tidemill.services.rollout.sessions.template_chat import with_arguments

NUM_CHARACTERS = 50_000
READ_CHARS = math_text.MOST_CHARS
"""A longer answer is not read."""
CPU_LIMIT_S = 0.5
"""A hundred times what a linear reader takes; a quadratic one takes seconds."""
SHARE = 4
"""First a text of a quarter of the length is read, in far less than the limit. Who takes longer than a reader
whose time grows with the cube of the length, and that just keeps the limit, reads the whole text as well."""

STARTS = ("", "<tool_call><function=f>", '<|python_tag|>{"name": "f", "arguments": [', "#### -$1")
UNITS = (
    "a", " ", "\n", "\t ", "`", "```", "```json", "```python\n", "``` \n", "<", "<tool_call>", "<function=",
    "<function=f>", "<parameter=", "<parameter=x>", "<parameter=x>\n", "</parameter>", "<think>", "</think>",
    "<|python_tag|>", "<|im_start|>user\n", "[", "{", '{"name":', '{"score":[', '"', "\\", "\\boxed{",
    "\\text{", "1", "1,", "1.", "-", "-$", "1e", "%", "#", "####", "####1,", "\ud800",
)  # fmt: skip
ENDS = ("x", "$", " ")
SHAPES = [*product(STARTS, UNITS, ("",)), *product(STARTS[-1:], UNITS, ENDS)]


class TooSlowError(BaseException):
    """No `Exception`: readers make something of those."""


@contextmanager
def limited() -> Iterator[None]:
    """CPU seconds of this process, so that a busy machine changes nothing."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def seconds_of(reader: Callable[[str], Any], text: str) -> float:
    """CPU seconds; without end where it reaches the limit."""
    start_s = time.thread_time()
    try:
        with limited():
            reader(text)
    except TooSlowError:
        return math.inf
    return time.thread_time() - start_s


def text_of(start: str, unit: str, end: str, num_characters: int) -> str:
    return start + unit * ((num_characters - len(start) - len(end)) // len(unit)) + end


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": arguments, "tool_calls": [call]}


def judged(text: str, **config: Any) -> None:
    for is_cut in (False, True):
        with suppress(RemoteFault):
            Verdict("j", VerdictConfig(**config)).read(text, text, is_cut=is_cut)


READERS: dict[str, Callable[[str], Any]] = {
    "hermes calls": lambda text: find_calls(text, "hermes"),
    "llama3 calls": lambda text: find_calls(text, "llama3"),
    "json calls": lambda text: find_calls(text, "json"),
    "arguments": lambda text: read_call({"name": "f", "arguments": text}),
    "arguments in histories": lambda text: identity(called(text)),
    "arguments in templates": lambda text: with_arguments(called(text), as_text=False),
    "code": extract_code,
    "gsm8k strict": lambda text: gsm8k.compute_score("", text, "1", method="strict"),
    "gsm8k flexible": lambda text: gsm8k.compute_score("", text, "1", method="flexible"),
    "exact match": lambda text: exact_match.compute_score("", text, "1", ignore_case=True),
    "math": math_text.readable,
    "math in a box": math_text.last_box,
    "math in words": lambda text: math_text.compare_words(text[:READ_CHARS], text[:READ_CHARS]),
    "math in one spelling": lambda text: math_text.normalised(text[:READ_CHARS]),
    "math guards": lambda text: math_text.must_differ(text[:READ_CHARS], text[1:READ_CHARS]),
    "verdict": judged,
    "verdict in a field": lambda text: judged(text, json_field="score"),
    "verdict of choices": lambda text: judged(text, choices={"yes": 1.0, "no": 0.0}),
    "sendable": codec.sendable,
    "page of a sample": lambda text: texts.visible(text),
}


@pytest.mark.parametrize("name", READERS)
def test_hostile_texts_are_read_in_linear_time(name):
    reader = READERS[name]
    slow = []
    for shape in SHAPES:
        if seconds_of(reader, text_of(*shape, NUM_CHARACTERS // SHARE)) < CPU_LIMIT_S / SHARE**3:
            continue
        if seconds_of(reader, text_of(*shape, NUM_CHARACTERS)) == math.inf:
            slow.append(shape)
    assert slow == []


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 100_000])
@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{{"name": "f", "arguments": {{"x": {}}}}}</tool_call>',
        "<tool_call><function=f><parameter=x>{}</parameter></function></tool_call>",
    ],
)
def test_a_call_that_is_nested_too_deep_to_be_encoded_is_a_wrong_call(call, depth):
    _, (parsed,) = find_calls(call.format("[" * depth + "]" * depth), "hermes")
    json.dumps(parsed.arguments)
    assert parsed.error or isinstance(parsed.arguments["x"], str)
