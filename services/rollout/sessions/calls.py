"""Calls of tools in what a model wrote, in the forms that most models were taught.

`hermes` is a JSON object or, as newer Qwen models write it, `<function=` with parameters, in `<tool_call>`;
`llama3` a JSON object, perhaps after a tag; `json` an object, objects or a list, perhaps in a fence.

A call that cannot be read becomes a `Call` with an error, which its environment answers: never an exception.
Models whose tokenizer brings a response template of its own are read by transformers in its place.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tidemill.services.rollout.sessions.chat import Call

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\A<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder(strict=False)
_SHOWN = 80


def format_of(template: str) -> str:
    """Which form a chat template shows the model."""
    if "<tool_call>" in template:
        return "hermes"
    is_llama = "<|python_tag|>" in template or '"parameters": ' in template
    return "llama3" if is_llama and "<|start_header_id|>" in template else "json"


def find_calls(text: str, call_format: str) -> tuple[str, tuple[Call, ...]]:
    """What the model said beside its calls, and the calls in order."""
    if call_format == "hermes":
        calls = tuple(_call(match[1]) for match in _BLOCK.finditer(text))
        return _BLOCK.sub("", text).strip() if calls else text, calls
    body = text.strip()
    has_tag = call_format == "llama3" and _PYTHON_TAG in body
    said, body = (part.strip() for part in body.split(_PYTHON_TAG, 1)) if has_tag else ("", body)
    if fenced := _FENCE.match(body):
        body = fenced[1]
    if not has_tag and body[:1] not in ("{", "["):
        return text, ()
    calls = tuple(_calls_in(body, is_meant=has_tag))
    return (said, calls) if calls else (text, ())


def _calls_in(body: str, is_meant: bool) -> Iterator[Call]:
    """Objects one after the other, with `;` or a comma between them, or a list of objects."""
    place = 0
    while place < len(body):
        try:
            value, place = _DECODER.raw_decode(body, place)
        except (ValueError, RecursionError):
            if is_meant or _looks_meant(body[place:]):
                yield _call(body[place:])
            return
        for one in value if isinstance(value, list) else [value]:
            if is_meant or (isinstance(one, dict) and "name" in one):
                yield read_call(one)
        while place < len(body) and body[place] in " \t\r\n;,":
            place += 1


def _looks_meant(text: str) -> bool:
    """Whether broken JSON was to be a call, and no other answer that begins with a bracket."""
    return '"name"' in text and ('"arguments"' in text or '"parameters"' in text)


def _call(body: str) -> Call:
    if function := _FUNCTION.match(body.strip()):
        given = {name.strip(): _value(text) for name, text in _PARAMETER.findall(function[2])}
        return Call(function[1].strip(), given)
    try:
        value = _DECODER.decode(body.strip())
    except ValueError as error:
        return Call("", error=f"a call must be JSON with name and arguments ({error}): {_shown(body)}")
    except RecursionError:
        return Call("", error="a call must be JSON with name and arguments; this one is too deep")
    return read_call(value)


def _value(text: str) -> Any:
    """Text stays text, for only the tool knows its types; lists and objects are read."""
    if text.strip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def read_call(value: Any) -> Call:
    """One call; some models wrap it in `function`, and some write its arguments as text."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call("", error=f"a call must be JSON with name and arguments, got {_shown(repr(value))}")
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Call(name, error=f"the arguments must be a JSON object, got {_shown(repr(arguments))}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Call(name, error=f"the arguments must be a JSON object, got {_shown(repr(arguments))}")
    return Call(name, arguments)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
