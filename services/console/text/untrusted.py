"""Text of unknown origin on a terminal: shown, and nothing of it takes effect.

What a model, a judge or a broken process has written may hold anything. Markup is never interpreted (callers
wrap what they get in `rich.text.Text`), and characters that a terminal would act on, or that change the order
of reading, are shown as escapes.
"""


def printable(value: str, limit: int = 0) -> str:
    """Text in one line with everything but printable characters as escapes; cut off at `limit` with an
    ellipsis."""
    text = "".join(_visible(char) for char in (value[: 4 * limit] if limit else value))
    return text[: limit - 1] + "…" if limit and len(text) > limit else text


def printable_block(value: str, limit: int = 0) -> str:
    """The same with its line breaks kept; what is cut off at `limit` characters is counted in a last line."""
    shown = value[:limit] if limit else value
    lines = "\n".join("".join(map(_visible, line)) for line in shown.split("\n"))
    left_out = len(value) - len(shown)
    return f"{lines}\n… {left_out:,} more characters; --full shows all" if left_out else lines


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
