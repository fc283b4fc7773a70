"""docs/api.md is what the code has."""

import tidemill
from tidemill.common.process.programs import ROOT
from tidemill.services.console.reference.api_page import ORDER, as_markdown


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == as_markdown(), "python -m tidemill.services.console.reference.api_page docs/api.md"


def test_every_name_is_on_the_page() -> None:
    page = as_markdown()
    assert set(tidemill.__all__) - set(ORDER) == {"ConfigError", "TidemillError", "RunConfig"}
    assert all(f"`{name}`" in page or f"## {name}" in page for name in tidemill.__all__)
