"""Numbers in messages."""

LONGEST = 1e15
"""A whole number below it has digits that people can read."""


def few_digits(value: float, digits: int = 3) -> str:
    """A number rounded to so many digits, or to a whole number if that has more of them.

    Of three digits: 0.125, 1.5, 61 and 1,235. `:.3g` writes the last one as 1.23e+03. Only numbers from
    `LONGEST` on and those below 0.0001 have an exponent.
    """
    if 10**digits - 0.5 <= abs(value) < LONGEST:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
