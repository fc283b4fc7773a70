"""vLLM's processes in little time."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def forked_engines() -> Iterator[None]:
    """vLLM forks its processes. Workers have it spawn them, and then each imports all of vLLM again.

    `pipeline/test_vllm_training.py` and the tests of its servers start it as users do.
    """
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", forking)
        yield
