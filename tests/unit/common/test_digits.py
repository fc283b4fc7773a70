"""Numbers in messages have no exponent where people want to read their size."""

import math

import pytest

from tidemill.common.digits import few_digits

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (0.125, 3, "0.125"), (1.5, 3, "1.5"), (61.04, 3, "61"), (999.4, 3, "999"), (999.6, 3, "1,000"),
        (1234.6, 3, "1,235"), (-1234.6, 3, "-1,235"), (0.0, 3, "0"),
        (99.4, 2, "99"), (99.6, 2, "100"), (127.3, 2, "127"), (1e-7, 2, "1e-07"),
        (1e30, 3, "1e+30"), (math.inf, 3, "inf"), (math.nan, 3, "nan"),
    ],
)  # fmt: skip
def test_a_number_is_rounded_and_has_no_exponent_for_its_size(value, digits, expected):
    assert few_digits(value, digits) == expected
