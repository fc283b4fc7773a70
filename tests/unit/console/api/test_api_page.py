"""docs/api.md has every name."""

import tidemill
from infra.docs.api_page import ORDER, as_markdown


def test_every_name_is_on_the_page() -> None:
    page = as_markdown()
    assert set(tidemill.__all__) - set(ORDER) == {"ConfigError", "TidemillError", "RunConfig"}
    assert all(f"`{name}`" in page or f"## {name}" in page for name in tidemill.__all__)
