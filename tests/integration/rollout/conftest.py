"""vLLM's processes in little time."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tidemill.common.process.programs import VLLM_EXTENSION
from tidemill.common.process.vllm_machine import NO_COMPILING, machine_environment


@pytest.fixture(scope="module")
def forked_engines() -> Iterator[None]:
    """vLLM forks its processes. Workers have it spawn them, and then each imports all of vLLM again.

    `pipeline/test_vllm_training.py` and the tests of its servers start it as users do.
    """
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(multiprocessing, "get_context", forking)
        # It acts where it is imported: in the process of the engine. Other tests have imported it here.
        patch.delitem(sys.modules, VLLM_EXTENSION.rpartition(".")[0], raising=False)
        if machine_environment(os.environ).get(NO_COMPILING) == "1":
            # Torch reads the variable when it is imported, which it is in the process that is forked.
            stack.enter_context(torch._dynamo.config.patch(disable=True))
        yield
