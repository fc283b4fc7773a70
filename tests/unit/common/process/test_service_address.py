"""A worker beside `tidemill up` finds the Redis of its run."""

import os
from pathlib import Path

import pytest

from tidemill.common.errors import BrokerError
from tidemill.common.process.service import _find_address
from tidemill.common.redis.client import URL_VARIABLE

KEPT = "unix:///tmp/kept.sock"
SET = "redis://host:6379/0"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(URL_VARIABLE, "")
    return tmp_path / "redis.url"


def test_connections_and_child_processes_get_the_address_in_the_runs_folder(file: Path) -> None:
    file.write_text(f"{KEPT}\n")
    _find_address(file)
    assert os.environ[URL_VARIABLE] == KEPT


def test_an_address_in_the_environment_goes_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, SET)
    file.write_text(KEPT)
    _find_address(file)
    assert os.environ[URL_VARIABLE] == SET


@pytest.mark.parametrize("text", [None, "", "\n"], ids=["no file", "empty", "a line break"])
def test_without_an_address_file_and_variable_are_named(file: Path, text: str | None) -> None:
    """The file is empty for a moment while it is written."""
    if text is not None:
        file.write_text(text)
    with pytest.raises(BrokerError) as caught:
        _find_address(file)
    assert URL_VARIABLE in str(caught.value) and str(file) in str(caught.value)
    assert not os.environ[URL_VARIABLE]
