"""Processes of users' code hold no passwords of the run: a tool may show a model what is there."""

import time

import psutil
import pytest

from tidemill.common.process.children import kill_group, spawn
from tidemill.common.process.programs import Child


@pytest.mark.parametrize("child", list(Child))
def test_processes_of_users_code_hold_no_passwords(monkeypatch, child):
    secrets = ("REDIS_URL", "REDIS_USERNAME", "REDIS_PASSWORD", "SENTINEL_PASSWORD", "WEIGHTS_TOKEN")
    for name in secrets:
        monkeypatch.setenv(f"TIDEMILL_{name}", "s3cret")
    monkeypatch.setenv("MY_OWN_KEY", "mine")
    monkeypatch.setenv("ANOTHER_KEY", "s3cret")
    monkeypatch.setenv("TIDEMILL_PASS_ENV", "MY_OWN_*,TIDEMILL_REDIS_PASSWORD")
    process, channel = spawn(child)
    try:
        while not (variables := psutil.Process(process.pid).environ()):
            time.sleep(0.01)  # the kernel has not written them yet
    finally:
        channel.close()
        kill_group(process)
        process.wait()
    assert "s3cret" not in variables.values()
    assert variables["MY_OWN_KEY"] == "mine"
