"""AMX tiles that a CPU lists and the system does not allow are found before vLLM uses them."""

import subprocess
import sys

import torch

from tests.support.preloaded import REPO


def test_bfloat16_is_refused_where_the_cpu_lists_tiles_that_may_not_be_used():
    """On a CPU without tiles vLLM computes it without them."""
    program = (
        "from tidemill.common.process import vllm_machine as m\n"
        "m.is_cpu_build = lambda: True\n"
        "try: print(m.machine_arguments(['--dtype', 'bfloat16'], 'reward grader'))\n"
        "except Exception as error: print(error)\n"
    )
    command = [sys.executable, "-m", "tests.support.without_amx", sys.executable, "-c", program]
    said = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    if torch.cpu._is_amx_tile_supported():
        assert said.startswith("reward grader: ") and "SIGILL" in said and "Use float32" in said
    else:
        assert said == "[]\n"
