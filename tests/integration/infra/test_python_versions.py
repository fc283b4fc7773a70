"""`make` takes the Python versions on which the project is tested, and refuses others by name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.preloaded import REPO

PRETENDER = """#!{python}
import sys
sys.version_info = {version}
exec(sys.argv[2])
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")
@pytest.mark.parametrize("version", [(3, 10, 14), (3, 14, 0)])
def test_a_python_that_was_not_tried_is_refused_before_anything_is_installed(tmp_path: Path, version) -> None:
    pretender = tmp_path / "python3"
    pretender.write_text(PRETENDER.format(python=sys.executable, version=version))
    pretender.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", f"{venv}/.created.stamp", f"VENV={venv}", f"PYTHON={pretender}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2
    assert "3.11, 3.12 or 3.13" in done.stderr
    assert not venv.exists()
