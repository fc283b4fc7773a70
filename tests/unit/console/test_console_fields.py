"""The config reference comes from the models, so that it cannot say anything else than they do."""

import io

import pytest
from rich.console import Console

from tidemill.common.errors import ConfigError
from tidemill.services.console.check.explain import print_fields, read_sections


def printed(wanted: str) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_fields(wanted, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_field_of_a_section_and_those_inside_it_is_shown_with_bounds_and_default() -> None:
    silent = [field.name for section in read_sections() for field in section.fields if not field.text]
    assert silent == []
    text = printed("streams")
    for expected in ("streams.lease_s", "float, >= 0.2, <= 3600; default 30.0", "taken over"):
        assert expected in text
    assert "trainer.steps" not in text and "trainer.optimizer.lr" in printed("trainer")
    assert "trainer.steps" in printed("") and "model.path" in printed("")
    with pytest.raises(ConfigError, match="no section 'trainr'; sections are model, data"):
        print_fields("trainr")
