"""The commands of a shell script, with its variables in place; nothing is run.

A variable that is set in a condition, or by a program, has no known value: what depends on it is `Unknown`.
"""

import ast
import re
import shlex
from collections.abc import Mapping
from operator import add, floordiv, mod, mul, sub

BREAKS = ";&|()\n"
OPENING, CLOSING = ("if", "case", "for", "while", "until", "{"), ("fi", "esac", "done", "}")
BETWEEN = ("then", "else", "elif", "do", "!", "export", "local", "declare", "readonly")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_COMMENT = re.compile(r"(^|(?<=\s))#[^\n]*", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$([A-Za-z_]\w*)|\$[@*\d]|\x00(\d+)\x00")
_LIST = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: floordiv, ast.Mod: mod}


class Unknown(str):
    """Source text in place of a value that only running the file would give."""

    __slots__ = ()


class Script:
    """Variables fill as the script is read; those that are given go before what it assigns."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given
        self.variables: dict[str, str | list[str]] = {"HOME": "~", **given}
        self.programs: list[str] = []
        """Each `$(...)` and `$((...))`."""
        self.depth = 0
        """Blocks around the command."""

    def read(self, text: str) -> list[list[str]]:
        """The words of each command, in order.

        Raises:
            ValueError: a quotation does not end.
        """
        text = self._set_programs_aside(_COMMENT.sub("", text).replace("\\\n", " "))
        lexer = shlex.shlex(text, posix=True, punctuation_chars=BREAKS)
        lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
        commands: list[list[str]] = []
        words: list[str] = []
        array: list[str] | None = None
        is_tied = False
        for token in [*lexer, "\n"]:
            if not set(token) <= set(BREAKS):
                (words if array is None else array).append(token)
                continue
            if array is None and token.startswith("(") and words and words[-1].endswith("="):
                array = []
            if array is None or ")" in token:
                if command := self._do(words, array, is_tied):
                    commands.append(command)
                words, array, is_tied = [], None, token.endswith(("&&", "||"))
        return commands

    def _set_programs_aside(self, text: str) -> str:
        while (start := text.find("$(")) >= 0:
            depth = 0
            for end in range(start + 1, len(text)):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                if not depth:
                    break
            self.programs.append(text[start : end + 1])
            text = f"{text[:start]}\0{len(self.programs) - 1}\0{text[end + 1 :]}"
        return text

    def _do(self, words: list[str], array: list[str] | None, is_tied: bool) -> list[str]:
        """Sets the variables that a command sets; returns its words, none if that is all."""
        while words and words[0] in (*OPENING, *CLOSING, *BETWEEN):
            self.depth += (words[0] in OPENING) - (words[0] in CLOSING)
            words = words[1:]
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            values = [it for word in array for it in self.expanded(word)] if array is not None else found[3]
            self._assign(found[1], bool(found[2]), values, self.depth > 0 or is_tied)
            words = words[1:]
        return [it for word in words for it in self.expanded(word)]

    def _assign(self, name: str, appends: bool, value: str | list[str], is_conditional: bool) -> None:
        if name in self.given:
            return
        before = self.variables.get(name)
        new = self._whole(value) if isinstance(value, str) else value
        if appends and isinstance(new, list):
            new = [*(before if isinstance(before, list) else ()), *new]
        elif appends and not isinstance(new, Unknown):
            new = before if isinstance(before, Unknown) else f"{before or ''}{new}"
        self.variables[name] = Unknown(f"${name}") if is_conditional and new != before else new

    def expanded(self, word: str) -> list[str]:
        """The words that one word becomes: several for an array, or a variable with spaces."""
        if word in ("$@", "$*"):
            return []
        if found := _LIST.fullmatch(word):
            value = self.variables.get(found[1], Unknown(word))
            is_one = isinstance(value, Unknown)
            return value if isinstance(value, list) else [Unknown(word)] if is_one else shlex.split(value)
        return [self._whole(word)]

    def _whole(self, word: str) -> str:
        text = word
        try:
            for _ in range(4):  # defaults may hold variables
                text = _VARIABLE.sub(self._value, text)
        except (KeyError, ValueError, SyntaxError, ZeroDivisionError):
            text = "${"
        if not re.search(r"\$\{(?![\w.]+\})", text):
            return text
        return Unknown(re.sub(r"\0(\d+)\0", lambda found: self.programs[int(found[1])], word))

    def _value(self, found: re.Match[str]) -> str:
        """Raises KeyError, ValueError: it is not known."""
        name, default, bare, program = found.groups()
        if program is not None:
            return self._computed(self.programs[int(program)])
        if not (name or bare):
            return ""
        value = self.variables.get(name or bare) or default
        value = self.variables[name or bare] if value is None else value
        if isinstance(value, Unknown):
            raise ValueError(value)
        return value if isinstance(value, str) else " ".join(value)

    def _computed(self, program: str) -> str:
        if not program.startswith("$(("):
            raise ValueError(program)
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: self._whole(f"${found[1]}"), program[2:-1])
        return str(_compute(ast.parse(text, mode="eval").body))


def _compute(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_compute(node.left), _compute(node.right)))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.unparse(node))
