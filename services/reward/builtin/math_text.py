"""Answers of mathematical tasks as text: the box of a completion, one spelling, and answers that are words.

`normalised` brings truth and answer into a spelling that math-verify reads. `compare_words` and `must_differ`
decide what math-verify cannot: it reads letters as a product, in any order and case, and leaves bases out.
All of it takes time in proportion to the text.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_CHARS = 10_000
_BOX_TOKENS = re.compile(
    r"\\++(?P<box>boxed|fbox)(?![A-Za-z])\s*+(?P<brace>\{)?"
    r"|(?:\\\\)*+\\[^\\]|(?:\\\\)++|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_UNBRACED = re.compile(r"[^\n${}]*+")


@dataclass(slots=True)
class _OpenBrace:
    box_start: int | None
    """Where the box begins whose brace it is; None for any other brace."""
    content_start: int


@dataclass(slots=True)
class _Boxes:
    closed: list[tuple[int, int, int]] = field(default_factory=list)
    """Start of the box, start and end of its content; of boxes in a box only the outer one."""
    open_braces: list[_OpenBrace] = field(default_factory=list)

    def close(self, end: int) -> None:
        if not self.open_braces:
            return
        brace = self.open_braces.pop()
        if brace.box_start is None:
            return
        while self.closed and self.closed[-1][0] > brace.box_start:
            self.closed.pop()
        self.closed.append((brace.box_start, brace.content_start, end))


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{}` or `\fbox{}`; empty if it is not closed; None if there is no box."""
    boxes = _Boxes()
    for token in _BOX_TOKENS.finditer(text):
        if token["box"] and token["brace"]:
            boxes.open_braces.append(_OpenBrace(token.start(), token.end()))
        elif token["box"]:
            content = _UNBRACED.match(text, token.end())
            assert content is not None
            boxes.closed.append((token.start(), token.end(), content.end()))
        elif token["open"]:
            boxes.open_braces.append(_OpenBrace(None, token.end()))
        elif token["close"]:
            boxes.close(token.start())
    never_closed = [brace.box_start for brace in boxes.open_braces if brace.box_start is not None]
    last_closed = boxes.closed[-1][0] if boxes.closed else -1
    if never_closed and never_closed[-1] > last_closed:
        return ""  # the completion was cut off: `\boxed{1` may have become 18
    if not boxes.closed:
        return None
    content_start = boxes.closed[-1][1]
    content_end = boxes.closed[-1][2]
    return _without_boxes(text[content_start:content_end])


def _without_boxes(text: str) -> str:
    r"""The text with `5` in place of `\boxed{5}`."""
    pieces = []
    is_box = []
    position = 0
    for token in _BOX_TOKENS.finditer(text):
        is_kept = True
        if token["box"]:
            is_kept = False
            if token["brace"]:
                is_box.append(True)
        elif token["open"]:
            is_box.append(False)
        elif token["close"] and is_box:
            is_kept = not is_box.pop()
        pieces.append(text[position : token.end() if is_kept else token.start()])
        position = token.end()
    return "".join([*pieces, text[position:]])


# math-verify reads neither `####18`, where no number begins at a word's border, nor `-$5`, whose dollar it
# takes for the beginning of a formula. A dollar that another one closes is a formula, and stays. Numbers
# match as a whole only (`++`): trying shorter ones would read the rest again each time.
_MARK = re.compile(r"(?<!#)#{2,}(?=\S)")
_DEBT = re.compile(r"(?<![\w$)\]}])[-−][ \t]?\\?\$(?=(?:\d[\d,]*+(?:\.\d++)?+|\.\d++)(?![\d.,]*[ \t]*\\?\$))")
_NOT_WIDE = {0xFF01 + offset: 0x21 + offset for offset in range(94)}
_PERCENT = re.compile(r"\\?%|\\text\s*\{\s*per ?cent(?:age)?\s*\}|(?<=[\d}\s])(?:per ?cent(?:age)?|pct)\b")
_SCIENTIFIC = re.compile(r"(?<![\w\\.])(\d++(?:\.\d*+)?+|\.\d++)[eE]([-+−]?)(\d++)(?![\w^]|\.\d)")


def readable(text: str) -> str:
    r"""A text with its numbers in a form that math-verify reads: `####5`, `-$5`, `6e-3`, wide digits.

    A sign of percent is a unit, as in MATH's grader: `50\%` is 50.
    """
    if not text.isascii():
        text = text.translate(_NOT_WIDE)
    # A look for one character costs a tenth of a pattern's search.
    if "%" in text or "p" in text:
        text = _PERCENT.sub("", text)
    if "e" in text or "E" in text:
        text = _SCIENTIFIC.sub(_power_of_ten, text)
    if "##" in text:
        text = _MARK.sub(r"\g<0> ", text)
    return _DEBT.sub("-", text) if "$" in text else text


def _power_of_ten(match: re.Match[str]) -> str:
    sign = "-" if match[2] in ("-", "−") else ""
    return rf"{match[1]} \times 10^{{{sign}{match[3]}}}"


_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = rf"(?P<scale>{'|'.join(_SCALES)})s?"
_SCALED = re.compile(
    rf"(?<=\d)[\s~]*+(?:\\[,; ])?\s*+"
    rf"(?:\\text\s*\{{\s*{_SCALE}\b(?P<unit>[^{{}}]*)\}}|{_SCALE.replace('scale', 'bare')}\b)"
)
_GROUPED = re.compile(r"(?<=\d)(?:\\[,;! ]|\{,\}|['’~\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?<![\w.,])\d{1,3}(?: \d{3})++(?![\w,])")
_SIZES = re.compile(r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])|\\(?:display|text|script)style(?![A-Za-z])")
_ROW_SPACE = re.compile(r"\\\\\s*\[-?[\d.]+\s*(?:pt|em|ex|mm|cm)\]")
_CURRENCIES = re.compile(r"\\text\s*\{\s*[€£¥₹¢]\s*\}|\\?[€£¥₹¢]")
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SUBSCRIPT = re.compile(rf"[{''.join(_SUBSCRIPTS)}]++")
# Units of several factors at the end of an answer, such as `\mathrm{~m} / \mathrm{s}^2` and `km/h`.
_UNIT = (
    r"(?:\\(?:mathrm|text|textrm|operatorname)\s*\{[~\s]*[A-Za-z°µμΩ. ]+\}|\\(?:Omega|mu)\b)(?:\^\{?-?\d\}?)?"
)
_UNITS = re.compile(rf"(?<=[\d}}])(?:\s|~|\\[,;: ])*{_UNIT}(?:\s*(?:/|\\cdot|~|\\,)?\s*{_UNIT})+\Z")
_PLAIN_UNITS = re.compile(r"(?<=\d) ?(?:[kcm]?m/(?:h|s|min)(?:\^?2)?|°[CF]|mph|k[gJWN]/[a-z]{1,3})\Z")
_SYMBOLS = {
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}",
    "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}",
    "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}", "\u2044": "/",
    "\u211d": r"\mathbb{R} ", "\u2208": r"\in ",
    "°": r"^\circ ", "∞": r"\infty ", "·": r"\cdot ", "⋅": r"\cdot ", "∅": r"\emptyset ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "\u222a": r"\cup ", "∩": r"\cap ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ",
}  # fmt: skip
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_SUPERSCRIPT = re.compile(rf"[{''.join(_SUPERSCRIPTS)}]++")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([\w.]+))")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*\{?(\d{1,20})\}?")
# math-verify takes all from the first `\text` to the end of an answer for a unit.
_LABEL = re.compile(r"\A\\(?:text|mathrm)\s*\{[^{}]*\}\s*=\s*")
_SENTENCE = re.compile(
    r"\A\\(?:text|mathrm|textbf|textrm)\s*\{\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?"
    r"answer(?:\s+is)?\s*:?\s*\}\s*[:=]?\s*",
    re.IGNORECASE,
)
"""`\\text{The answer is }` before an answer."""
_OR_OF_INTERVALS = re.compile(r"([\])])\s*\\(?:text|mbox|mathrm)\s*\{\s*or\s*\}\s*(\\left|[\[(])")
_CONGRUENCE = re.compile(r"\A[A-Za-z]\s*\\equiv\s*(?=[^=]*\\pmod)")
_UNIT_IN_LIST = re.compile(
    r"(?<=[\d}])[\s~]*+(?:\\[,; ])?\\text\s*\{[^{},\d]*\}(?:\^(?:\d|\{\d\}))?(?=\s*[,;)\]])"
)
_PM = re.compile(r"\\pm(?![A-Za-z])\s*")
_MIXED = re.compile(r"([-+−]?\s*\d+)\s+(\d+)\s*/\s*(\d+)")
_COUNTED = re.compile(r"([-+−]?\s*[\d.,]*\d)\s+(\w{3,})")
_NO_UNIT = re.compile(
    r"squared|cubed|factorial|halves|thirds|quarters|fifths|\w*ths|and|plus|minus|times|over|mod|choose|root|dozen",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\$\$?(?P<dollars>[^$]*)\$\$?|\\\((?P<round>.*)\\\)|\\\[(?P<square>.*)\\\]", re.DOTALL)
_END = re.compile(r"(?:\s|[.,;:]|\\[,;:!. ])+\Z")


def normalised(text: str) -> str:
    """The text of an answer, without a box, in one spelling; empty if it is too long for an answer."""
    if len(text) > MOST_CHARS:
        return ""
    text = _trimmed(readable(text))
    if text[:1] == "–":
        text = f"-{text[1:]}"
    if "\\" in text:
        text = _ROW_SPACE.sub(r"\\\\ ", _SIZES.sub("", text))
    text = _PLAIN_UNITS.sub("", _UNITS.sub("", text))
    text = _GROUPED.sub("", text)
    if " " in text:
        text = _SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    if "d" in text or "lion" in text:  # hundred, thousand, million, ...
        text = _SCALED.sub(_scaled, text)
    if not text.isascii():
        text = _in_commands(text)
    text = text.replace(r"\varnothing", r"\emptyset")
    if "\\" in text:
        text = _OR_OF_INTERVALS.sub(r"\1\\cup \2", text)
        text = _CONGRUENCE.sub("", _SENTENCE.sub("", _LABEL.sub("", text)))
        text = _UNIT_IN_LIST.sub("", _both_signs(text))
        text = _REPEATING.sub(_fraction_of_repeating, text)
    mixed = _MIXED.fullmatch(text)
    return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}" if mixed else text.strip()


def _in_commands(text: str) -> str:
    """Symbols of Unicode as commands; signs of currencies are left out."""
    text = _CURRENCIES.sub("", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{''.join(map(_SUPERSCRIPTS.__getitem__, match[0]))}}}", text)
    text = _SUBSCRIPT.sub(lambda match: f"_{{{''.join(map(_SUBSCRIPTS.__getitem__, match[0]))}}}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    return text


def _both_signs(text: str) -> str:
    r"""`(1+x)/2, (1-x)/2` for `(1 \pm x)/2`, which math-verify cannot read inside of a formula."""
    if text.count(r"\pm") != 1 or _LIST_SEPARATOR.search(text) or text.lstrip().startswith(r"\pm"):
        return text
    return f"{_PM.sub('+', text)}, {_PM.sub('-', text)}"


def without_counted(answer: str, truth: str) -> str:
    """The number of an answer such as `12 dollars`, where the truth is a number."""
    counted = _COUNTED.fullmatch(answer)
    if counted is None or _NO_UNIT.fullmatch(counted[2]) or re.search(r"[^\W\d_]", truth):
        return answer
    return counted[1]


def _trimmed(text: str) -> str:
    while True:
        before = text
        text = text.strip()
        end = _END.search(text[-40:])
        if end is not None:
            text = text[: len(text) - len(end[0])]
        formula = _FORMULA.fullmatch(text)
        if formula is not None:
            text = next(inner for inner in formula.groups() if inner is not None)
        text = text.removeprefix("=").removeprefix(r"\approx")
        if text == before:
            return text


def _scaled(match: re.Match[str]) -> str:
    exponent = _SCALES[match["scale"] or match["bare"]]
    unit = (match["unit"] or "").strip()
    return rf" \times 10^{{{exponent}}}" + (rf"\text{{ {unit}}}" if unit else "")


def _fraction_of_repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    numerator = int(f"{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}")
    denominator = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|sc|normal|up)?|math(?:rm|bf|it|sf)|operatorname|[mhf]box)\s*\{([^{}]*)\}"
)
_SPACE = re.compile(r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z]))+")
_WORDS = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*(?: [^\W\d_]+(?:['’-][^\W\d_]+)*)*")
_DIGIT = re.compile(r"\d")
_GREEK = re.compile(r"[\u0370-\u03ff]")
_LIST = re.compile(r"(?:\\left)?(\\\{|\(|\[)(.*?)(?:\\right)?(\\\}|\)|\])", re.DOTALL)
_LIST_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\band\b|\bor\b)\s*")
_ANY_CASE = ("yes", "no", "true", "false")
_FORMULA_WORDS = {
    "infinity": r"\infty",
    "negative infinity": r"-\infty",
    "pi": r"\pi",
    "empty set": r"\emptyset",
    "all real numbers": r"(-\infty, \infty)",
    "all reals": r"(-\infty, \infty)",
    "real numbers": r"(-\infty, \infty)",
}
_MOST_WORDS_CHARS = 1000
Same = Callable[[str, str], bool]


def formula_of_words(text: str) -> str:
    r"""`\infty` for `infinity`; other texts as they are."""
    words = _words_of(text)
    return _FORMULA_WORDS.get(words.lower(), text) if words else text


def compare_words(truth: str, answer: str) -> bool | None:
    """Whether two answers that consist of words, or are lists of words, are the same. None: one of them does
    not, so that formulas have to be compared."""
    words = _words_of(truth)
    answer_words = _words_of(answer)
    if words and answer_words:
        return is_same_word(words, answer_words)
    items = _list_of(truth)
    answer_items = _list_of(answer)
    if items is None or answer_items is None:
        return None
    if len(items.words) != len(answer_items.words) or {items.is_ordered, answer_items.is_ordered} == {
        True,
        False,
    }:
        return False
    if items.is_ordered:
        return all(map(is_same_word, items.words, answer_items.words))
    remaining = list(answer_items.words)
    for word in items.words:
        match = next((candidate for candidate in remaining if is_same_word(word, candidate)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


def are_words(text: str) -> bool:
    return _words_of(text) is not None or _list_of(text) is not None


def is_same_word(word: str, candidate: str) -> bool:
    """Letter by letter. The case of a first letter is free in words of three letters or more, any case in
    yes, no, true and false. Two small letters are a product, in either order."""
    if word == candidate:
        return True
    if word.lower() in _ANY_CASE:
        return word.lower() == candidate.lower()
    if len(word) == 2 and word.islower():
        return word == candidate[::-1]
    if len(word) < 3:
        return False
    singles = word.split(" ")
    others = candidate.split(" ")
    return len(singles) == len(others) and all(
        single[1:] == second[1:] and single[0].casefold() == second[0].casefold()
        for single, second in zip(singles, others, strict=True)
    )


def _words_of(text: str) -> str | None:
    """The words that a text consists of; None if it has anything else, such as a digit or a command."""
    if len(text) > _MOST_WORDS_CHARS or _DIGIT.search(text):
        return None
    for _ in range(3):
        text = _TEXT_COMMAND.sub(r"\1", text)
    text = _SPACE.sub(" ", text).strip(" .\"'“”*")
    if text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1].strip(" .")
    if not _WORDS.fullmatch(text) or (_GREEK.search(text) and len(text) < 4):
        return None
    singles = text.split(" ")
    if all(len(single) == 1 for single in singles) and len(singles) > 1:
        return "".join(singles) if len(singles) > 2 else None
    return text.replace("’", "'")


@dataclass(frozen=True, slots=True)
class _WordList:
    words: list[str]
    is_ordered: bool | None
    """None: it stands without brackets, and may be meant as either."""


def _list_of(text: str) -> _WordList | None:
    if len(text) > _MOST_WORDS_CHARS or _DIGIT.search(text) or not _LIST_SEPARATOR.search(text):
        return None
    for _ in range(3):
        text = _TEXT_COMMAND.sub(r"\1", text)
    brackets = _LIST.fullmatch(text.strip())
    inside = brackets[2] if brackets else text
    words = [_words_of(item) for item in _LIST_SEPARATOR.split(inside)]
    read_words = [word for word in words if word]
    if len(words) < 2 or len(read_words) < len(words):
        return None
    return _WordList(read_words, None if brackets is None else brackets[1] != r"\{")


_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTERS = re.compile(r"[^\W\d_]++")
_BASED = re.compile(r"(?<![A-Za-z0-9\\_.])\(?([0-9A-Z]*\d[0-9A-Z.]*+)\)?_(?:\{(\w+)\}|(\w))")
_UNIT_AT_END = re.compile(r"(?<=[\d}\s])\s+[A-Za-z]{1,4}\Z")
_AND_OR = re.compile(r"\\(?:text|mbox)\s*\{\s*(?:and|or)\s*\}")
_UNIT_AFTER_NUMBER = re.compile(
    r"\d[\s~}]*+(?:\\[,; ]\s*)?\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}(?:\^(?:\d|\{[^{}]*\}))?(.*)\Z",
    re.DOTALL,
)
_SEPARATOR = re.compile(r"[,;&]")
_HALF_OF_DAY = re.compile(r"(?<=[\d\s~}{])([ap])\.?\s?m\b", re.IGNORECASE)
_MODULUS = re.compile(
    r"\s*\\(?:pmod|bmod|mod)\s*(\{[^{}]*\}|\d+)|\s*\(\s*\\(?:bmod|mod|text\{mod\s*\})\s*(\{[^{}]*\}|\d+)\s*\)"
)
_HEDGING_TEXT = re.compile(
    r"\\(?:text|mbox|mathrm|textrm)\s*\{(?=[^{}]*\b(?:or|not|maybe|perhaps|possibly)\b)(?!\s*or\s*\})[^{}]*\}",
    re.IGNORECASE,
)
"""Words such as `\\text{ or maybe four}`, which math-verify takes for a unit."""
_CHOICE = re.compile(
    r"\A(?:\((?P<round>[A-J])\)\.?|(?P<bare>[A-J])[.:)](?=\s))"
    r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z]))*+(?P<value>[^-+*/^=,;<>\s].*)\Z",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"\([A-J]\)|\b(?:or|and)\b")
_NAMED_CHOICE = re.compile(r"\A(?:option|choice|answer)\s*:?\s*\(?([A-J])\)?\Z", re.IGNORECASE)
_LETTER = re.compile(r"[A-J]")
_INTEGER = re.compile(r"\d++(?:\.\d++)?+")
_BRACKETS = re.compile(r"(?:\\left)?(\\\{|\(|\[).*,.*(?:\\right)?(?:\\\}|\)|\])", re.DOTALL)


def must_differ(truth: str, answer: str) -> bool:
    """Whether two answers differ in what math-verify leaves out: the base of a number, the order or the case
    of letters, whether it is a set or a tuple, all that follows a first unit."""
    if _after_first_unit(truth) != _after_first_unit(answer):
        return True
    bases = _bases(truth)
    answer_bases = _bases(answer)
    if bases and answer_bases and bases != answer_bases:
        return True
    halves = {match.lower() for match in _HALF_OF_DAY.findall(truth)}
    answer_halves = {match.lower() for match in _HALF_OF_DAY.findall(answer)}
    if halves and answer_halves and halves != answer_halves:
        return True
    if _moduli(truth) and _moduli(answer) and _moduli(truth) != _moduli(answer):
        return True
    if "{" in answer and _HEDGING_TEXT.search(answer) and not _HEDGING_TEXT.search(truth):
        return True
    bracket = _outer_bracket(truth)
    answer_bracket = _outer_bracket(answer)
    if bracket and answer_bracket and (bracket == r"\{") != (answer_bracket == r"\{"):
        return True
    if ("=" in truth) != ("=" in answer):  # `y = 2x` and `2x` are the same answer
        truth = truth.rpartition("=")[2]
        answer = answer.rpartition("=")[2]
    words = _long_words(truth)
    for word in _long_words(answer) - words:
        if any(
            _are_same_letters(word, candidate) and not is_same_word(word, candidate) for candidate in words
        ):
            return True
    cases = _cases(truth)
    answer_cases = _cases(answer)
    return any(cases[letter] != answer_cases[letter] for letter in cases.keys() & answer_cases.keys())


def _outer_bracket(text: str) -> str:
    """The bracket around all of a list; empty for `(1,2),(3,4)`, which are two."""
    brackets = _BRACKETS.fullmatch(text)
    if brackets is None:
        return ""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth <= 0 and character in ")]}" and index + 1 < len(text):
            return ""
    return brackets[1]


def _moduli(text: str) -> list[str]:
    matches = _MODULUS.findall(text) if "mod" in text else []
    return [(first or second).strip("{} ") for first, second in matches]


def without_modulus(answer: str, truth: str) -> str:
    r"""`3` for `3 \pmod{7}` where the truth names no modulus."""
    return _MODULUS.sub("", answer).strip() if "mod" in answer and not _moduli(truth) else answer


def is_same_choice(truth: str, answer: str) -> bool | None:
    """Whether an answer such as `(A) 12` names the truth, the letter of a choice. None: they are no such."""
    letter = _words_of(truth)
    if letter is None or not _LETTER.fullmatch(letter):
        return None
    chosen, _ = choice_of(answer)
    return chosen == letter if chosen else None


def choice_of(text: str) -> tuple[str, str]:
    """The letter of a choice and its value, of `(A) 12` or `Option A`; an empty letter and the text if it is
    none."""
    if not _LETTER.search(text):
        return "", text
    plain = _TEXT_COMMAND.sub(r"\1", text).strip()
    choice = _CHOICE.match(plain)
    if choice is not None and not _OTHER_CHOICE.search(choice["value"]):
        return choice["round"] or choice["bare"], choice["value"]
    named = _NAMED_CHOICE.match(plain)
    return (named[1].upper(), text) if named else ("", text)


_NUM = r"\$?-?\d[\d,]*(?:\.\d+)?\$?"
_HEDGED_TEXT = re.compile(rf"{_NUM} ?,? or (?:maybe |perhaps )?{_NUM}|(?:(?<!\d){_NUM}[,;] ){{2,}}{_NUM}")


def is_hedged(text: str) -> bool:
    """Whether the last line of a text without a box names several numbers: `3 or 4`, `1, 2, 3`."""
    last_line = text.strip().rpartition("\n")[2][-200:]
    return any(match.end() > len(last_line) - 20 for match in _HEDGED_TEXT.finditer(last_line))


def numeric_sides(answer: str) -> list[str]:
    """Sides of an equation, but for the last one, that have no letters: `3` of `x = 3 = 4`."""
    sides = answer.split("=")[:-1]
    return [side for side in sides if side.strip() and not _LETTERS.search(_COMMAND.sub(" ", side))]


def _after_first_unit(text: str) -> list[str]:
    r"""The numbers after a unit: 20 of `3 \text{ h } 20 \text{ min}`, of which math-verify reads the 3."""
    if "\\" not in text:
        return []
    unit = _UNIT_AFTER_NUMBER.search(_AND_OR.sub(",", text))
    remainder = "" if unit is None else unit[1]
    return [] if _SEPARATOR.search(remainder) else _INTEGER.findall(remainder)


def _bases(text: str) -> Counter[tuple[str, str]]:
    matches = _BASED.finditer(text) if "_" in text else []
    return Counter((match[1], match[2] or match[3]) for match in matches)


def _long_words(text: str) -> set[str]:
    return {word for word in _LETTERS.findall(_COMMAND.sub(" ", text)) if len(word) > 2}


def _are_same_letters(word: str, candidate: str) -> bool:
    return sorted(word.casefold()) == sorted(candidate.casefold())


def _cases(text: str) -> dict[str, set[str]]:
    """For each letter that stands alone or in a pair, whether it is large, small or both."""
    if not _LETTERS.search(_COMMAND.sub("", text)):
        return {}
    plain = _UNIT_AT_END.sub("", _TEXT_COMMAND.sub(" ", text).strip())
    cases: dict[str, set[str]] = {}
    for letters in _LETTERS.findall(_COMMAND.sub(" ", plain)):
        for letter in letters if len(letters) < 3 else "":
            cases.setdefault(letter.casefold(), set()).add(letter)
    return cases
