"""The GPUs of this machine, as its own tool lists them."""

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
    if shutil.which(TOOL) is not None:
        listed = ask_driver("-L")
        return None if listed is None else len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    if any(Path(device).exists() for device in _OTHERS):
        return None
    return sum(device.name[6:].isdigit() for device in Path("/dev").glob("nvidia*"))


def smallest_gpu_bytes() -> float | None:
    """Memory of the GPU that has the least; None where it cannot be told, or there is none."""
    listed = ask_driver("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    found = [float(line) for line in (listed or "").split() if line.isdigit()]
    return min(found) * (1 << 20) if found else None


def ask_driver(*arguments: str) -> str | None:
    """What the driver's tool writes; None where it fails, or is not there."""
    try:
        # With a limit: where the driver hangs, the tool does not end by itself.
        result = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if result.returncode else result.stdout
