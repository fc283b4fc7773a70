"""Scripts have the keys, arguments and replies that their functions name."""

import inspect
import re
from collections.abc import Sequence
from enum import IntEnum
from importlib import resources
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from tidemill.common.redis import lease_scripts, reward_scripts, scripts

LUA = resources.files("tidemill.common.redis") / "lua"
NAMES = sorted(file.name.removesuffix(".lua") for file in LUA.iterdir() if file.name.endswith(".lua"))
FUNCTIONS = {
    name: function
    for module in (scripts, lease_scripts, reward_scripts)
    for name, function in inspect.getmembers(module, inspect.iscoroutinefunction)
    if function.__module__ == module.__name__
}
NOT_OF_LUA = ("broker", "check")
"""Parameters of the functions that no script gets."""
REPEATED = "..."
OPTIONAL = "?"
COUNT = "num_"
"""Marks of the words in a script's comment: `entries...`, `mark?`, `num_ended` of `ended...`."""
REPLIES: dict[str, Any] = {"limits": (0, 0), "reclaim": [1, b"", []]}
"""Replies of more than a number, for the calls below."""


def source_of(name: str) -> str:
    return (LUA / f"{name}.lua").read_text()


def code_of(name: str) -> str:
    """The Lua without its comments."""
    return re.sub(r"--.*", "", source_of(name))


def listed(name: str, table: str) -> list[str]:
    """The words of a script's comment about KEYS or ARGV: `payload`, `mark?`, `entries...`."""
    match = re.search(rf"^-- {table}: ((?:.+\n)+?)(?=-- [A-Z`]|(?!--))", source_of(name), re.M)
    assert match is not None, f"{name}.lua has no comment `-- {table}: ...`"
    text = re.sub(r"\([^)]*\)|^--|\n--|\n", " ", match[1])
    return re.findall(r"\w+(?:\.\.\.|\?)?", text)


def bare(word: str) -> str:
    return word.removesuffix(REPEATED).removesuffix(OPTIONAL)


def parameters(name: str) -> dict[str, Any]:
    """The types of a function's parameters that a script gets, in order."""
    hints = get_type_hints(FUNCTIONS[name], include_extras=True)
    signature = inspect.signature(FUNCTIONS[name])
    return {word: hints[word] for word in signature.parameters if word not in NOT_OF_LUA}


def is_key(hint: Any) -> bool:
    return hint is scripts.Key or scripts.Key in get_args(hint)


def is_counted(word: str, words: Sequence[str]) -> bool:
    """Whether an argument is the number of entries of another one."""
    return word.startswith(COUNT) and word.removeprefix(COUNT) + REPEATED in words


def test_every_script_has_a_function() -> None:
    assert set(FUNCTIONS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_names_keys_and_arguments_as_its_script_does(name: str) -> None:
    keys = [word for word, hint in parameters(name).items() if is_key(hint)]
    arguments = [word for word, hint in parameters(name).items() if not is_key(hint)]
    words = listed(name, "ARGV")
    assert keys == [bare(word) for word in listed(name, "KEYS")]
    assert arguments == [bare(word) for word in words if not is_counted(word, words)]


@pytest.mark.parametrize("name", NAMES)
def test_optional_and_repeated_arguments_have_such_types(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    for word in [*listed(name, "KEYS"), *listed(name, "ARGV")]:
        if is_counted(word, listed(name, "ARGV")):
            continue
        has_default = signature.parameters[bare(word)].default is None
        assert has_default is word.endswith(OPTIONAL), word
        is_sequence = get_origin(parameters(name)[bare(word)]) is Sequence
        assert is_sequence is word.endswith(REPEATED), word


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("table", ["KEYS", "ARGV"])
def test_a_script_reads_all_that_it_is_given_and_no_more(name: str, table: str) -> None:
    words = listed(name, table)
    fixed = [word for word in words if not word.endswith(REPEATED)]
    read = {int(number) for number in re.findall(rf"{table}\[(\d+)\]", code_of(name))}
    first_repeated = len(fixed) + 1
    if len(words) > len(fixed):
        # Repeated arguments are read from here on: by a loop, by `unpack`, or from a local with this number.
        start = rf"(?:for i = |unpack\({table}, |= ){first_repeated}\b"
        assert re.search(start, code_of(name)), f"nothing begins at {table}[{first_repeated}]"
        read.discard(first_repeated)
    assert read == set(range(1, first_repeated))


class Recorder:
    """Takes the call of a script in place of Redis."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.name = ""
        self.keys: list[Any] = []
        self.args: list[Any] = []

    async def script(self, name: str, keys: Sequence[Any], args: Sequence[Any], check: Any = None) -> Any:
        self.name = name
        self.keys = list(keys)
        self.args = list(args)
        return self.reply


def example_of(word: str, hint: Any) -> Any:
    """A value that shows where it arrives: the parameter's name, or pairs of it and a number."""
    if hint is bool:
        return True
    if get_origin(hint) is not Sequence:
        return word
    (of,) = get_args(hint)
    return [(f"{word} 1", 1), (f"{word} 2", 2)] if get_origin(of) is tuple else [f"{word} 1", f"{word} 2"]


def flat(values: Any) -> list[Any]:
    if isinstance(values, bool):
        return [int(values)]
    if not isinstance(values, list):
        return [values]
    items: list[Any] = []
    for value in values:
        items += value if isinstance(value, tuple) else (value,)
    return items


@pytest.mark.parametrize("name", NAMES)
async def test_a_call_has_everything_where_the_script_reads_it(name: str) -> None:
    values = {word: example_of(word, hint) for word, hint in parameters(name).items()}
    is_list = str(inspect.signature(FUNCTIONS[name]).return_annotation).startswith("list[")
    broker = Recorder(REPLIES.get(name, [] if is_list else 1))
    await FUNCTIONS[name](broker, **values)
    expected: list[Any] = []
    words = listed(name, "ARGV")
    for word in words:
        counted = word.removeprefix(COUNT)
        expected += [len(values[counted])] if is_counted(word, words) else flat(values[bare(word)])
    assert broker.name == name
    assert broker.keys == [values[bare(word)] for word in listed(name, "KEYS")]
    assert broker.args == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_number_that_a_script_replies_has_a_name(name: str) -> None:
    kind = get_type_hints(FUNCTIONS[name])["return"]
    kinds = [k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, IntEnum)]
    numbers = {int(number) for number in re.findall(r"(?:return|result =) (-?\d+)\b", code_of(name))}
    for enum in kinds:
        assert numbers == {member.value for member in enum}
    if not kinds and kind is bool:
        assert numbers <= {0, 1}
    if not kinds and kind is int:
        assert numbers <= {scripts.NO_MARK, scripts.NO_STREAM}
