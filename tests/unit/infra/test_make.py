"""What `make` says: its commands in columns, and how far a long installation is."""

import re
import subprocess
from pathlib import Path

import pytest

from tidemill.common.process.programs import ROOT

WATCH = ROOT / "infra" / "install" / "watch.sh"


def test_the_commands_stand_in_columns() -> None:
    output = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in output.splitlines() if re.match(r"  [a-z]", line)]
    starts = {re.match(r"  ([a-z-]+ +)", line).end() for line in lines}
    assert len(starts) == 1, "every text begins in the same column"
    assert "(ENGINE=transformers|vllm)" in output, "no text is cut off"
    assert max(map(len, output.splitlines())) <= 80
    assert "push-image" not in output


def test_the_commands_for_releases_are_listed_where_they_are_wanted() -> None:
    command = ["make", "help", "ALL=1"]
    assert (
        "push-image" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_long_command_says_how_far_it_is_and_its_exit_code_counts(tmp_path: Path, code: int) -> None:
    script = f'head -c 3000000 /dev/zero > "$TMPDIR/a.whl"; sleep 2.5; exit {code}'
    done = subprocess.run(
        [WATCH, tmp_path, "bash", "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "WATCH_S": "1"},
    )
    assert done.returncode == code
    assert re.search(r"^    \d+ s, [3-9] MB$", done.stdout, re.MULTILINE), done.stdout
    assert list(tmp_path.iterdir()) == [], "its downloads are removed"


def test_a_short_command_says_nothing_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([WATCH, tmp_path, "echo", "a"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a\n", "")
