"""The GPUs of this machine, as nvidia-smi lists them."""

import re
import shutil
import subprocess
from pathlib import Path

TOOL = "nvidia-smi"
TOOL_TIMEOUT_S = 30.0
_OTHERS = ("/dev/kfd", "/dev/dxg")
"""Devices of GPUs that the tool does not list: AMD's, and those of WSL."""


def count_gpus() -> int | None:
    """Number of GPUs; None where it is unknown."""
    if shutil.which(TOOL) is not None:
        listed = ask_driver("-L")
        return None if listed is None else len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    if any(Path(device).exists() for device in _OTHERS):
        return None
    return sum(device.name[6:].isdigit() for device in Path("/dev").glob("nvidia*"))


def smallest_gpu_bytes() -> float | None:
    """Memory of the smallest GPU; None where it is unknown, or there is none."""
    listed = ask_driver("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes_mib = [float(line) for line in (listed or "").split() if line.isdigit()]
    return min(sizes_mib) * (1 << 20) if sizes_mib else None


def ask_driver(*arguments: str) -> str | None:
    """Output of the driver's tool; None where it fails, or is not there."""
    try:
        # With a limit: where the driver hangs, the tool does not end by itself.
        result = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if result.returncode else result.stdout
