"""docs/tutorial.md as a reader follows it: its files are written, its commands run in one shell, in order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"Write this into `([\w.]+)`:\n\n\Z")
OUTPUT = "text"


REAL = "## 9. "
"""The part with a real model."""


def script(page: str) -> str:
    """The page as a shell script: files become here-documents, `sh` blocks stand as they are."""
    parts = []
    for block in FENCE.finditer(page):
        language, text = block.groups()
        named = FILE_NAME.search(page, 0, block.start())
        if named:
            parts.append(f"cat > {named[1]} <<'END OF FILE'\n{text}END OF FILE\n")
        elif language != OUTPUT:
            assert language == "sh", f"neither a command, a named file nor output: {text}"
            parts.append(text)
    return "set -euo pipefail\n" + "".join(parts)


def test_every_file_of_the_tutorial_is_named_before_it_is_used() -> None:
    names = re.findall(r"^cat > (\S+) ", script(PAGE.read_text(encoding="utf-8")), re.MULTILINE)
    small = ["make_data.py", "reward.py", "config.yaml", "use.py"]
    assert names == [*small, "make_questions.py", "begins.py", "real.yaml"]


def follow(page: str, home: Path) -> str:
    """Run the commands of a part of the page; returns what they print."""
    if Path(sys.prefix) != ROOT / ".venv":
        # The page activates .venv/: its commands would run there, and not in the environment of this test.
        pytest.skip("the tutorial is for the environment that make installs into .venv/")
    commands = script(page)
    if subprocess.run(["make", "-q", "install"], cwd=ROOT).returncode:
        # Lock files are newer than the environment: tests do not install, they only see that make would.
        commands = commands.replace("make install\n", "make -n install\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    env |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-c", commands], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)  # a whole run and nine commands, on a busy machine
def test_every_command_of_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    said = follow(PAGE.read_text(encoding="utf-8").partition(REAL)[0], tmp_path)
    assert "{'score': -0.5, 'readable': 0.0}" in said
    assert "43-17=" in said.splitlines()[-2]
    run = tmp_path / "tutorial" / "runs" / "first"
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 12
    assert json.loads((run / "summary.json").read_text())["duplicated_in_training"] == 0
    assert (tmp_path / "tutorial" / "my-model" / "model.safetensors").stat().st_size > 3_000_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_part_with_a_real_model_works_as_it_is_written(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    folder = tmp_path / "tutorial"
    folder.mkdir()
    begin = f"```sh\nsource .venv/bin/activate\ncd {folder}\n```\n"
    follow(begin + page.partition(REAL)[2], tmp_path)
    summary = json.loads((folder / "runs" / "real" / "summary.json").read_text())
    assert summary["lost"] == summary["duplicated_in_training"] == 0
