"""The config reference comes from the models, so that it cannot say anything else than they do."""

import io

import pytest
from rich.console import Console

from tidemill.common.errors import ConfigError
from tidemill.services.console.check.fields import print_fields, read_sections


def printed(wanted: str) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_fields(wanted, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_field_says_what_it_is_for() -> None:
    silent = [field.name for section in read_sections() for field in section.fields if not field.text]
    assert silent == []


def test_a_field_is_shown_with_type_bounds_and_default() -> None:
    text = printed("streams")
    for expected in ("streams.lease_s", "float, >= 0.2, <= 3600; default 30.0", "taken over"):
        assert expected in text
    assert "trainer.steps" not in text


def test_a_section_holds_those_inside_it() -> None:
    assert "trainer.optimizer.lr" in printed("trainer")
    assert "trainer.steps" in printed("") and "model.path" in printed("")


def test_a_section_that_is_not_there_is_a_plain_error() -> None:
    with pytest.raises(ConfigError, match="no section 'trainr'; sections are model, data"):
        print_fields("trainr")
