"""What tests start is forked from a process that has imported the services, in each kind of test run."""

import os

import pytest

from tests.support.preloaded import run_code


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forking needs Linux")
def test_a_process_with_the_environment_of_a_test_run_has_nothing_to_import() -> None:
    """Each service of a run would import torch for five seconds otherwise, which no other test notices."""
    done = run_code("import sys; print('torch' in sys.modules)", os.environ)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
