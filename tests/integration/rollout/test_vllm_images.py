"""Real vLLM engines with small models that see, one for each family: logprobs of one, several and no pictures
before and after updates of tower and text, and an update in flight. Engine and torchvision are in a process
of their own (tests/support/vllm_pictures.py)."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.small_vision_models import SMALL_FAMILIES
from tests.support.vllm_machine import need_vllm
from tidemill.common.process.vllm_machine import OWN_TORCHVISION

need_vllm()
if find_spec("torchvision") is None and not (OWN_TORCHVISION / "torchvision").is_dir():
    pytest.skip("torchvision is not there; run `make torchvision`", allow_module_level=True)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

TOLERANCE = 1e-5


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_logprobs_are_those_of_plain_passes_before_and_after_updates_of_tower_and_text(
    tmp_path: Path, family: str
) -> None:
    command = [sys.executable, "-m", "tests.support.vllm_pictures", family, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert len(answer["gaps"]) == 5 and max(answer["gaps"]) < TOLERANCE, answer["gaps"]
    assert answer["spans"] == [[[[version, 0]]] for version in range(4)]
    assert answer["patchable"], "deltas of tower and text are proven and written where they lie"
    assert answer["versions"] == [3, 4], "the update came while requests waited and ran"
    assert answer["banned"] == 0 and answer["refused"]
