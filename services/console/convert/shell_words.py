"""The words of a shell script: where each ends, and what becomes of the variables in it."""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from tidemill.common.errors import ConfigError

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_PARAMETER = re.compile(r"^(#?)([A-Za-z_]\w*|[@*#?0-9])(\[[^\]]*\])?(.*)$", re.DOTALL)
_WORDS_APART = "\0"
"""Stands between the words of an array that is expanded in quotes."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word as it stands there, an operator, or an array that is assigned."""

    kind: Literal["word", "operator", "array"]
    text: str
    items: tuple[str, ...] = ()
    appends: bool = False

    @property
    def is_word(self) -> bool:
        """Whether it is a word."""
        return self.kind == "word"

    def is_operator(self, text: str) -> bool:
        """Whether it is this operator."""
        return self.kind == "operator" and self.text == text


def tokens_of(text: str) -> Iterator[Token]:
    """The tokens of a script, without comments and here documents.

    Raises:
        ConfigError: a quotation or a parenthesis does not end.
    """
    text = _without_here_documents(text.replace("\r\n", "\n").replace("\\\n", " "))
    position = 0
    while position < len(text):
        char = text[position]
        if char in " \t":
            position += 1
        elif char == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif found := next((item for item in _OPERATORS if text.startswith(item, position)), ""):
            yield Token("operator", found)
            position += len(found)
        elif array := _ARRAY.match(text, position):
            end = _end_of_nest(text, array.end() - 1)
            items = tuple(item.text for item in tokens_of(text[array.end() : end - 1]) if item.is_word)
            yield Token("array", array[1], items, bool(array[2]))
            position = end
        else:
            end = _end_of_word(text, position)
            yield Token("word", text[position:end])
            position = end


def _without_here_documents(text: str) -> str:
    lines, kept, until = text.split("\n"), [], ""
    for line in lines:
        if until:
            until = "" if line.strip() == until else until
            continue
        if (found := _HERE_DOCUMENT.search(line)) and "<<<" not in line:
            until, line = found[2], line[: found.start()]
        kept.append(line)
    return "\n".join(kept)


def _end_of_word(text: str, position: int) -> int:
    while position < len(text):
        char = text[position]
        if char in " \t\n;|&()":
            return position
        position = _after(text, position)
    return position


def _after(text: str, position: int) -> int:
    """The position after one character, quotation or expansion."""
    char = text[position]
    if char == "\\":
        return position + 2
    if char in "'`":
        return _end_of_quotation(text, position, char)
    if char == '"':
        end = position + 1
        while end < len(text) and text[end] != '"':
            end = _after(text, end) if text[end] in "\\$`" else end + 1
        return _checked(text, end) + 1
    if char == "$" and text[position + 1 : position + 2] in ("(", "{"):
        return _end_of_nest(text, position + 1)
    return position + 1


def _end_of_quotation(text: str, position: int, mark: str) -> int:
    end = text.find(mark, position + 1)
    return _checked(text, end if end >= 0 else len(text)) + 1


def _end_of_nest(text: str, position: int) -> int:
    opener = text[position]
    closer = {"(": ")", "{": "}"}[opener]
    depth, position = 1, position + 1
    while position < len(text) and depth:
        char = text[position]
        if char == "#" and text[position - 1] in " \t\n" and opener == "(":
            position = max(text.find("\n", position), position + 1)
            continue
        depth += (char == opener) - (char == closer)
        position = position + 1 if char in (opener, closer) else _after(text, position)
    if depth:
        raise ConfigError(f"the script ends where {closer!r} was expected")
    return position


def _checked(text: str, position: int) -> int:
    if position >= len(text):
        raise ConfigError("a quotation in the script does not end")
    return position


class Words:
    """Variables and arrays, and what words become with them."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        self.arrays: dict[str, list[str]] = {}

    def assign(self, name: str, raw: str, appends: bool = False) -> None:
        """Set a variable to a word that is not expanded yet."""
        before = self.variables.get(name, "") if appends else ""
        self.variables[name] = before + " ".join(self._text(raw, splits=False).split(_WORDS_APART))

    def set_array(self, name: str, raw: tuple[str, ...], appends: bool) -> None:
        """Set an array to words that are not expanded yet, or add them to it."""
        items = [word for item in raw for word in self.expand(item)]
        self.arrays[name] = (self.arrays.get(name, []) if appends else []) + items

    def expand(self, raw: str) -> list[str]:
        """The words that one word of a script becomes."""
        text = self._text(raw, splits=True)
        if text or any(mark in raw for mark in "'\""):
            is_array = re.fullmatch(r'"?\$\{?[\w]*(\[[@*]\]|@)\}?"?', raw) is not None
            return [part for part in text.split(_WORDS_APART) if part or not is_array]
        return []

    def _text(self, raw: str, splits: bool) -> str:
        parts: list[str] = []
        position = 0
        while position < len(raw):
            end = _after(raw, position)
            piece = raw[position:end]
            if piece[0] == "\\":
                parts.append(piece[1:])
            elif piece[0] == "'":
                parts.append(piece[1:-1])
            elif piece[0] == '"':
                parts.append(self._quoted(piece[1:-1]))
            elif piece[0] == "$":
                value, end = self._expansion(raw, position)
                parts.append(re.sub(r"\s+", _WORDS_APART, value.strip()) if splits else value)
            elif piece[0] != "`":
                parts.append(piece)
            position = end
        return "".join(parts)

    def _quoted(self, raw: str) -> str:
        parts: list[str] = []
        position = 0
        while position < len(raw):
            if raw[position] == "\\" and raw[position + 1 : position + 2] in ('"', "$", "`", "\\"):
                parts.append(raw[position + 1])
                position += 2
            elif raw[position] == "$":
                value, position = self._expansion(raw, position)
                parts.append(value)
            else:
                parts.append(raw[position])
                position += 1
        return "".join(parts)

    def _expansion(self, raw: str, position: int) -> tuple[str, int]:
        """What begins with `$`, and where it ends."""
        if raw.startswith("$((", position):
            end = _end_of_nest(raw, position + 1)
            return self._arithmetic(raw[position + 3 : end - 2]), end
        if raw.startswith("$(", position):
            end = _end_of_nest(raw, position + 1)
            return self._output(raw[position + 2 : end - 1]), end
        if raw.startswith("${", position):
            end = _end_of_nest(raw, position + 1)
            return self._parameter(raw[position + 2 : end - 1]), end
        if found := _NAME.match(raw, position + 1):
            return self._value(found[0], ""), found.end()
        return "$", position + 1

    def _value(self, name: str, index: str) -> str:
        if name in ("@", "*") or index in ("[@]", "[*]"):
            return _WORDS_APART.join(self.arrays.get(name, []))
        if index and index[1:-1].isdigit():
            items = self.arrays.get(name, [])
            return items[int(index[1:-1])] if int(index[1:-1]) < len(items) else ""
        return self.variables.get(name, "")

    def _parameter(self, raw: str) -> str:
        found = _PARAMETER.match(raw)
        if found is None:
            return ""
        is_length, name, index, rest = found[1], found[2], found[3] or "", found[4]
        value = self._value(name, index)
        if is_length:
            return str(len(self.arrays.get(name, [])) if index else len(value))
        is_set = name in self.variables or name in self.arrays
        for sign in (":-", "-", ":=", "="):
            if rest.startswith(sign):
                has_value = bool(value) if sign[0] == ":" else is_set
                other = self._text(rest[len(sign) :], splits=False)
                if not has_value and sign.endswith("="):
                    self.variables[name] = other
                return value if has_value else other
        if rest.startswith((":+", "+")):
            has_value = bool(value) if rest[0] == ":" else is_set
            return self._text(rest.lstrip(":").removeprefix("+"), splits=False) if has_value else ""
        return _cut(value, rest) if rest[:1] in ("#", "%") else value

    def _output(self, raw: str) -> str:
        """What `$(...)` prints: of its `echo` commands only, for nothing else is run and all else fails."""
        succeeded, text, words = True, "", []
        joint = ""
        for token in [*tokens_of(raw), Token("operator", "\n")]:
            if token.is_word:
                words.append(token.text)
                continue
            if words and (not joint or succeeded == (joint == "&&")):
                succeeded = words[0] == "echo"
                if succeeded:
                    text = " ".join(part for word in words[1:] for part in self.expand(word))
            joint, words = token.text if token.text in ("&&", "||") else "", []
        return text

    def _arithmetic(self, raw: str) -> str:
        known = re.sub(r"\$\{?(\w+)\}?", r"\1", raw).strip()
        try:
            return str(_evaluate(ast.parse(known, mode="eval").body, self.variables))
        except (SyntaxError, ValueError, ArithmeticError, KeyError):
            return ""


_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr, variables: dict[str, str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(variables.get(name) or 0)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            return int(_ARITHMETIC[type(sign)](_evaluate(left, variables), _evaluate(right, variables)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, variables)
    raise ValueError("not arithmetic")


def _cut(value: str, rest: str) -> str:
    """`${name#pattern}` and `${name%pattern}`: the value without the shortest (doubled: longest) match."""
    sign, pattern = rest[0], rest[1:].removeprefix(rest[0])
    lengths = range(len(value) + 1)
    if rest[1:2] == sign:
        lengths = range(len(value), -1, -1)
    for length in lengths:
        part = value[:length] if sign == "#" else value[len(value) - length :]
        if fnmatchcase(part, pattern):
            return value[length:] if sign == "#" else value[: len(value) - length]
    return value
