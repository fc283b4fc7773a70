"""How many GPUs this machine has, without a library that would have to be loaded for it."""

import re
import shutil
import subprocess
from pathlib import Path

TOOL = "nvidia-smi"
TOOL_TIMEOUT_S = 30.0
_OTHERS = ("/dev/kfd", "/dev/dxg")
"""Devices behind which there are GPUs that the tool does not know."""


def count_gpus() -> int | None:
    """Their number; None where it cannot be told."""
    if (tool := shutil.which(TOOL)) is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE)) if not listed.returncode else None
    if any(Path(device).exists() for device in _OTHERS):
        return None
    return sum(device.name[6:].isdigit() for device in Path("/dev").glob("nvidia*"))
