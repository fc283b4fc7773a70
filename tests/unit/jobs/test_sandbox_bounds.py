"""A job asks for limits; its worker's run decides how far."""

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.jobs.sandbox.job import run_code_of, within

OWN = [SandboxConfig(memory_mb=256, packages=False), SandboxConfig(memory_mb=512, time_s=2.0)]


def test_who_asks_does_not_decide_how_safe_it_is() -> None:
    asked = SandboxConfig(memory_mb=1 << 20, time_s=3600.0, packages=True)
    found = within(asked, OWN)
    assert (found.memory_mb, found.packages) == (512, False)
    assert found.time_s == 6.0
    assert within(OWN[1], OWN) == OWN[1]


def test_a_job_of_another_run_or_of_another_id_is_refused() -> None:
    run_code = run_code_of("mine", OWN)
    with pytest.raises(ValueError, match="the job of yours"):
        run_code("yours", "1", "print()", {}, {})
    with pytest.raises(ValueError, match="whose result it would write"):
        run_code("mine", "1", "print()", {}, {})
    with pytest.raises(ValueError, match="memory_mb"):
        run_code("mine", "1", "print()", {}, {"memory_mb": -1})
