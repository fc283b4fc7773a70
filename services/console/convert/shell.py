"""Reads the command that a shell script would start, without running anything.

Known are assignments, arrays, `if`, `case`, arithmetic and the usual expansions of variables. A program in a
condition or in `$(...)` counts as failed; elsewhere as done. Loops and functions are passed over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.shell_words import Token, Words, tokens_of

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_ENDS = {"then", "else", "elif", "fi", "esac", "do", "done", "}"}
_AFTER_COMMAND = ("\n", ";", "&", ";;")


def read_commands(text: str, variables: Mapping[str, str]) -> list[list[str]]:
    """The words of each command that a script starts, in order.

    `variables` are those of the environment; what is not among them is empty.

    Raises:
        ConfigError: a quotation or a block does not end.
    """
    script = Script(list(tokens_of(text)), Words(dict(variables)))
    script.run(set())
    return script.commands


@dataclass
class Script:
    """A position in the tokens; `commands` fills as it moves on."""

    tokens: list[Token]
    words: Words
    commands: list[list[str]] = field(default_factory=list)
    position: int = 0

    def run(self, ends: set[str], is_live: bool = True) -> None:
        """Go on to one of `ends`, or to the end of the script."""
        while (token := self._next_command()) is not None:
            if token.is_word and token.text in ends:
                return
            if token.is_operator(";;") and ";;" in ends:
                return
            self._list(is_live)
        if ends:
            raise ConfigError(f"the script ends where {' or '.join(sorted(ends))} was expected")

    def _next_command(self) -> Token | None:
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if not (token.is_operator("\n") or token.is_operator(";") or token.is_operator("&")):
                return token
            self.position += 1
        return None

    def _peek(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def _list(self, is_live: bool, in_condition: bool = False) -> bool:
        """Commands joined by `&&`, `||` and `|`; whether the last one that ran succeeded."""
        before = self.position
        succeeded = self._command(is_live, in_condition)
        self.position += self.position == before  # what belongs nowhere, such as a single `)`
        while (token := self._peek()) is not None and token.text in ("&&", "||", "|") and not token.is_word:
            self.position += 1
            self._next_command()
            wanted = is_live and (token.text == "|" or succeeded == (token.text == "&&"))
            result = self._command(wanted, in_condition)
            succeeded = result if wanted else succeeded
        return succeeded

    def _command(self, is_live: bool, in_condition: bool) -> bool:
        token = self._peek()
        if token is None:
            return True
        if token.is_operator("("):
            self.position += 1
            return True
        if token.is_word and token.text in ("if", "case", "for", "while", "until", "function", "{", "!"):
            return self._block(token.text, is_live, in_condition)
        following = self.tokens[self.position + 1] if self.position + 1 < len(self.tokens) else None
        if following is not None and following.is_operator("("):
            self.position += 2
            self._pass_over({"{"}, {"}"})
            return True
        return self._simple(is_live, in_condition)

    def _block(self, keyword: str, is_live: bool, in_condition: bool) -> bool:
        self.position += 1
        if keyword == "if":
            self._if(is_live)
        elif keyword == "case":
            self._case(is_live)
        elif keyword == "{":
            self.run({"}"}, is_live)
            self.position += 1
        elif keyword == "!":
            return not self._command(is_live, in_condition)
        elif keyword == "function":
            self._pass_over({"{"}, {"}"})
        else:
            self._pass_over({"for", "while", "until"}, {"done"}, depth=1)
        return True

    def _pass_over(self, openers: set[str], closers: set[str], depth: int = 0) -> None:
        while (token := self._peek()) is not None:
            self.position += 1
            if token.is_word and token.text in openers:
                depth += 1
            elif token.is_word and token.text in closers:
                depth -= 1
                if depth == 0:
                    return

    def _if(self, is_live: bool) -> None:
        is_done = False
        while True:
            self._next_command()
            holds = True
            while (token := self._next_command()) is not None and token.text != "then":
                holds = self._list(is_live and not is_done, in_condition=True)
            self.position += 1
            self.run({"elif", "else", "fi"}, is_live and holds and not is_done)
            is_done = is_done or holds
            end = self._peek()
            self.position += 1
            if end is None or end.text == "fi":
                return
            if end.text == "else":
                self.run({"fi"}, is_live and not is_done)
                self.position += 1
                return

    def _case(self, is_live: bool) -> None:
        subject = " ".join(self.words.expand(self.tokens[self.position].text))
        self.position += 2  # the word, `in`
        is_done = False
        while (token := self._next_command()) is not None and token.text != "esac":
            patterns: list[str] = []
            while not self.tokens[self.position].is_operator(")"):
                token = self.tokens[self.position]
                if token.is_word:
                    patterns.append(" ".join(self.words.expand(token.text)))
                self.position += 1
            self.position += 1
            holds = not is_done and any(fnmatchcase(subject, pattern) for pattern in patterns)
            self.run({";;", "esac"}, is_live and holds)
            is_done = is_done or holds
            if (end := self._peek()) is not None and end.is_operator(";;"):
                self.position += 1
        self.position += 1

    def _simple(self, is_live: bool, in_condition: bool) -> bool:
        words: list[str] = []
        is_test = False
        while (token := self._peek()) is not None:
            if not is_test and token.kind == "operator" and token.text != "(":
                break
            if not is_test and token.is_word and token.text in _ENDS and not words:
                break
            self.position += 1
            if token.kind == "array":
                if is_live:
                    self.words.set_array(token.text, token.items, token.appends)
                continue
            is_test = is_test or (token.is_word and token.text == "[[" and not words)
            if not is_live:
                pass
            elif not words and (found := _ASSIGNMENT.match(token.text)):
                self.words.assign(found[1], found[3], appends=bool(found[2]))
            else:
                words += self.words.expand(token.text) if token.is_word else [token.text]
            if is_test and token.is_word and token.text == "]]":
                break
        return self._do(words, in_condition) if is_live and words else True

    def _do(self, words: list[str], in_condition: bool) -> bool:
        """The command itself: what sets variables or tests them has an effect, the rest is noted."""
        name = words[0]
        if name in _DECLARING:
            for word in words[1:]:
                if found := _ASSIGNMENT.match(word):
                    self.words.variables[found[1]] = found[3]
            return True
        if name in ("[", "[[", "test"):
            return holds(words[1:-1] if name != "test" else words[1:])
        if name in ("true", ":", "set", "shift", "echo", "cd"):
            return True
        if name == "false":
            return False
        self.commands.append(words)
        return not in_condition


def holds(words: list[str]) -> bool:
    """Whether a test is true."""
    for operator, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if operator in words:
            at = words.index(operator)
            return combine((holds(words[:at]), holds(words[at + 1 :])))
    if words[:1] == ["!"]:
        return not holds(words[1:])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) >= 2 and words[0] in ("-z", "-n") and words[1:] == [""]:
        return words[0] == "-z"
    if len(words) == 3:
        left, operator, right = words
        if operator in ("=", "=="):
            return fnmatchcase(left, right)
        if operator == "!=":
            return not fnmatchcase(left, right)
        numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
        if operator in numbers and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            difference = int(left) - int(right)
            return {
                "==": difference == 0,
                "!=": difference != 0,
                "<": difference < 0,
                "<=": difference <= 0,
                ">": difference > 0,
                ">=": difference >= 0,
            }[numbers[operator]]
    return len(words) == 1 and words[0] != ""
