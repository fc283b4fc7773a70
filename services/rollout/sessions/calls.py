"""Calls of tools in what a model wrote, in the forms that most models are trained on.

* `hermes`: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, or as newer Qwen models write it,
  `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`.
* `llama3`: a JSON object, perhaps after the tag `<|python_tag|>`.
* `json`: an object, several, or a list of them, perhaps in a fence.

A call that cannot be read becomes a `Call` with an error, which its environment answers: never an exception.
If the tokenizer has a response template, transformers reads the calls by that instead.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tidemill.services.rollout.sessions.chat import Call

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\A<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
# One mark at a time, and names of bounded length: so the time is linear in the text. An expression for a
# whole parameter would look for its end from each beginning.
_PARAMETER_MARK = re.compile(r"<parameter=([^<>\n]{1,200})>|</parameter>")
_FENCE = "```"
_PYTHON_TAG = "<|python_tag|>"
_TOO_DEEP = "a call must be JSON with name and arguments; this one is too deep"
# Models write plain line breaks into strings, which strict JSON forbids.
_DECODER = json.JSONDecoder(strict=False)
_SHOWN = 80  # characters of a call, in an error
MAX_DEPTH = 100
"""Deepest nesting of lists and objects: deeper ones cannot be encoded everywhere that a call goes."""


def format_of(template: str) -> str:
    """The form of calls that a chat template shows the model."""
    if "<tool_call>" in template:
        return "hermes"
    is_llama = "<|python_tag|>" in template or '"parameters": ' in template
    return "llama3" if is_llama and "<|start_header_id|>" in template else "json"


def find_calls(text: str, call_format: str) -> tuple[str, tuple[Call, ...]]:
    """The text without its calls, and the calls in order."""
    if call_format == "hermes":
        calls = tuple(_call(match[1]) for match in _BLOCK.finditer(text))
        return _BLOCK.sub("", text).strip() if calls else text, calls
    body = text.strip()
    has_tag = call_format == "llama3" and _PYTHON_TAG in body
    said = ""
    if has_tag:
        said, body = map(str.strip, body.split(_PYTHON_TAG, 1))
    if body.startswith(_FENCE) and body.endswith(_FENCE) and len(body) >= 2 * len(_FENCE):
        body = body.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
    if not has_tag and body[:1] not in ("{", "["):
        return text, ()
    calls = tuple(_calls_in(body, is_meant=has_tag))
    return (said, calls) if calls else (text, ())


def _calls_in(body: str, is_meant: bool) -> Iterator[Call]:
    """Objects one after the other, with `;` or a comma between them, or a list of objects.

    `is_meant`: a tag says that these are calls. Without it, only what looks like a call is one.
    """
    position = 0
    while position < len(body):
        try:
            value, position = _DECODER.raw_decode(body, position)
        except (ValueError, RecursionError):
            remaining = body[position:]
            has_arguments = '"arguments"' in remaining or '"parameters"' in remaining
            # Text without these keys is no call, but another answer that begins with a bracket.
            if is_meant or ('"name"' in remaining and has_arguments):
                yield _call(remaining)
            return
        for item in value if isinstance(value, list) else [value]:
            if is_meant or (isinstance(item, dict) and "name" in item):
                yield read_call(item)
        while position < len(body) and body[position] in " \t\r\n;,":
            position += 1


def _call(body: str) -> Call:
    function = _FUNCTION.match(body.strip())
    if function:
        arguments = {name.strip(): _value(text) for name, text in _parameters(function[2])}
        return read_call({"name": function[1].strip(), "arguments": arguments})
    try:
        value = _DECODER.decode(body.strip())
    except ValueError as error:
        return Call("", error=f"a call must be JSON with name and arguments ({error}): {_shown(body)}")
    except RecursionError:
        return Call("", error=_TOO_DEEP)
    return read_call(value)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Names and values; a value extends to the next `</parameter>`, whatever is in it."""
    opened: re.Match[str] | None = None
    for mark in _PARAMETER_MARK.finditer(text):
        # `mark[1]` is the name in `<parameter=name>`; `</parameter>` has none.
        if opened is None:
            opened = mark if mark[1] else None
        elif not mark[1]:
            value = text[opened.end() : mark.start()]
            yield opened[1], value.removeprefix("\n").removesuffix("\n")
            opened = None


def _value(text: str) -> Any:
    """Text stays text, for only the tool knows its types; lists and objects are read."""
    if text.strip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


def read_call(value: Any) -> Call:
    """One call; some models wrap it in `function`, and some write its arguments as text."""
    # First: showing or encoding a value that is too deep recurses, and fails.
    if is_deeper(value, MAX_DEPTH):
        return Call("", error=_TOO_DEEP)
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call("", error=f"a call must be JSON with name and arguments, got {_shown(repr(value))}")
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Call(name, error=f"the arguments must be a JSON object, got {_shown(repr(arguments))}")
    # Again: arguments that were text have only now been read.
    return Call(name, error=_TOO_DEEP) if is_deeper(arguments, MAX_DEPTH) else Call(name, arguments)


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested more than `limit` deep."""
    # Level by level: a recursion would fail at Python's own limit, which this is to prevent.
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = inner
    return any(isinstance(item, dict | list) for item in level)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
