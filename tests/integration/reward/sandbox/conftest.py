"""Jails of both kinds: one that is made for its program, and one that is ready."""

from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.services.reward.sandbox import jail, job
from tidemill.services.reward.sandbox.warm import WarmJails, can_be_warm


@pytest.fixture
def warm(isolated: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmJails]:
    """Programs run in jails that are ready; one that gets a jail of its own without need fails the test.

    A checkout below /tmp needs that for programs with packages: a warm jail mounts another /tmp over them.
    """
    run_cold = jail._run_cold

    def run_with_file(program: Any, time_s: float, has_file: bool) -> Any:
        has_packages = program.config.packages
        needs_its_own = has_file or (has_packages and not can_be_warm(has_packages))
        assert needs_its_own, "the warm jail failed; see the output"
        return run_cold(program, time_s, has_file)

    def run_warm(*arguments: Any, **named: Any) -> Any:
        return jail.run_program(*arguments, **named | {"warm": jails})

    jails = WarmJails(job.SOURCES)
    monkeypatch.setattr(jail, "_run_cold", run_with_file)
    monkeypatch.setattr(job, "run_program", run_warm)
    yield jails
    jails.close()


@pytest.fixture(params=["cold", "warm"])
def each_jail(request: pytest.FixtureRequest, isolated: None) -> None:
    """The test runs once in jails of either kind."""
    if request.param == "warm":
        request.getfixturevalue("warm")
