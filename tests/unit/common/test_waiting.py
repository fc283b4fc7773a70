"""A long wait says what it waits for, less and less often; a short one says nothing."""

import time

import pytest

from tidemill.common.waiting import said_while_waiting


def test_a_wait_is_said_at_doublings_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def line(waited_s: float) -> str:
        return f"waited {waited_s:g} s"

    with said_while_waiting(line, 60.0):
        pass
    with said_while_waiting(line, 0.125):
        deadline = time.monotonic() + 30
        said = ""
        while said.count("\n") < 3 and time.monotonic() < deadline:
            said += capsys.readouterr().err
            time.sleep(0.01)
    assert said.splitlines()[:3] == ["waited 0.125 s", "waited 0.25 s", "waited 0.5 s"]
