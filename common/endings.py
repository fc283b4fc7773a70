"""How processes end, in words."""

import signal

SHELL_OFFSET = 128
"""A shell whose command ended by a signal ends with the signal's number and this."""


def ending_in_words(code: int) -> str:
    """An exit code in words; negative ones are signals, as Python has them: `exit code 3`, `SIGKILL`."""
    if is_illegal_instruction(code):
        return "SIGILL, an illegal instruction"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_illegal_instruction(code: int) -> bool:
    """Whether it ended on an instruction that its CPU lacks or may not use, as it will every time."""
    return code in (-signal.SIGILL, SHELL_OFFSET + signal.SIGILL)
