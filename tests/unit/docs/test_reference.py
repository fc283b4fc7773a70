"""Pages that are made from the code say what it says."""

import pytest

from infra.docs.reference import DOCS, MADE, current


@pytest.mark.parametrize("page", MADE)
def test_a_page_that_is_made_from_the_code_is_current(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == current(page), "python -m infra.docs.reference"
