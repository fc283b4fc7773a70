"""A worker that leaves a run that has ended may be stopped meanwhile; only a second signal exits at once."""

import pytest

from tidemill.common.process import shutdown as shutdown_module
from tidemill.common.process.shutdown import Shutdown


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_the_first_signal_lets_a_service_finish_and_the_second_exits(is_leaving, monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(shutdown_module.os, "_exit", codes.append)
    shutdown = Shutdown()
    if is_leaving:
        shutdown.begin("leaving: the run is finished")
    shutdown._handle_signal()
    assert shutdown.stopping.is_set()
    assert codes == []
    shutdown._handle_signal()
    assert codes == [130]
