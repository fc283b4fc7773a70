"""Real vLLM engines with small models that see, one for each family: logprobs of one, several and no pictures
before and after updates of tower and text, and an update in flight; and of sessions that show pictures.
Engine and torchvision are in a process of their own (vllm_pictures.py, vllm_picture_sessions.py)."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.small_vision_models import SMALL_FAMILIES
from tests.support.vllm_machine import need_vllm
from tidemill.common.process.vllm_machine import OWN_TORCHVISION

need_vllm()
if find_spec("torchvision") is None and not (OWN_TORCHVISION / "torchvision").is_dir():
    pytest.skip("torchvision is not there; run `make torchvision`", allow_module_level=True)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

TOLERANCE = 1e-5


def measure(module: str, family: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.support.{module}", family, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_logprobs_are_those_of_plain_passes_before_and_after_updates_of_tower_and_text(
    tmp_path: Path, family: str
) -> None:
    answer = measure("vllm_pictures", family, tmp_path)
    assert len(answer["gaps"]) == 5 and max(answer["gaps"]) < TOLERANCE, answer["gaps"]
    assert answer["spans"] == [[[[version, 0]]] for version in range(4)]
    assert answer["patchable"], "deltas of tower and text are proven and written where they lie"
    assert answer["versions"] == [3, 4], "the update came while requests waited and ran"
    assert answer["banned"] == 0 and answer["refused"]


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_sessions_that_show_pictures_have_the_logprobs_of_plain_passes(tmp_path: Path, family: str) -> None:
    answer = measure("vllm_picture_sessions", family, tmp_path)
    assert max(answer["gaps"]) < TOLERANCE, answer["gaps"]
    assert answer["later_pictures"] == [2] * 5 and answer["turns"] == [3] * 5
    assert answer["banned"] == 0
