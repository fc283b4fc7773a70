"""Virtual environments for packages that cannot be installed beside the product's."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).parents[2] / "build"


def python_with(name: str, module: str, *installs: Sequence[Any], base: str = sys.executable) -> Path:
    """The interpreter of `build/NAME`, which has the module: pip is given each of `installs` once. Where they
    cannot be installed, or there is no interpreter `base`, the test is skipped."""
    python = BUILD / name / "bin" / "python"
    proof = [python, "-c", f"import {module}"]
    commands: list[list[Any]] = []
    if not python.exists() or subprocess.run(proof, capture_output=True).returncode:
        if not shutil.which(base):
            pytest.skip(f"build/{name} cannot be made: there is no {base}")
        commands = [[base, "-m", "venv", BUILD / name]]
        commands += [[python, "-m", "pip", "-q", "install", *arguments] for arguments in installs]
        commands.append(proof)
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
        if done.returncode:
            pytest.skip(f"build/{name} cannot be made: {done.stderr.strip()[-200:]}")
    return python
