"""`make test` gives tests that failed beside others a second look, alone; real failures stay failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, TESTS
from tests.second_look import HEADING
from tests.support.preloaded import REPO

BESIDE = "'PYTEST_XDIST_WORKER' in __import__('os').environ"


def look(folder: Path, *words: str, **files: str) -> tuple[int, str]:
    """Exit code and output of a run of these files of tests on two workers."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    # Without plugins that these tests have no use for: they take most of the time of a start.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(REPO), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.second_look", ".", "-q", "-n", "2", "-p", "xdist.plugin", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_what_passes_alone_is_named_and_the_run_is_green(tmp_path):
    code, output = look(tmp_path, test_a=f"def test_a(): pass\ndef test_b(): assert not {BESIDE}\n")
    assert code == 0, output
    assert output.rstrip().endswith(f"=== {HEADING}\n    test_a.py::test_b")


def test_a_fixture_of_a_module_that_fails_once_is_one_cause_however_many_tests_it_fails(tmp_path):
    fixture = f"import pytest\n@pytest.fixture(scope='module')\ndef server(): assert not {BESIDE}\n"
    tests = "".join(f"def test_{i}(server): pass\n" for i in range(30))
    code, output = look(tmp_path, test_a=fixture + tests, test_b="def test_b(): pass\n")
    assert code == 0, output
    assert output.partition(HEADING)[2].count("test_a.py::test_") == 30


@pytest.mark.parametrize(
    ("files", "words", "code"),
    [
        ({"test_a": f"def test_a(): assert 0\ndef test_b(): assert not {BESIDE}\n"}, (), 1),
        ({"test_a": f"def test_b(): assert not {BESIDE}\n", "test_b": "import no_such_module\n"}, (), 1),
        ({"test_a": f"def test_b(): assert not {BESIDE}\n"}, ("-x",), 2),
        ({f"test_{i}": f"def test_it(): assert not {BESIDE}\n" for i in range(13)}, (), 1),
        ({"test_a": "def test_a(): pass\n"}, ("-k", "nothing"), 5),
    ],
    ids=["fails alone", "not collected", "stopped", "too many", "none"],
)
def test_anything_else_is_no_success(files, words, code, tmp_path):
    exit_code, output = look(tmp_path, *words, **files)
    assert exit_code == code, output
    assert HEADING not in output


def test_a_file_that_cannot_be_imported_is_no_empty_file_in_a_forked_process(tmp_path):
    """The process that others are forked from has failed to import it already."""
    (tmp_path / "test_a.py").write_text("import no_such_module\ndef test_a(): pass\n")
    code = (
        "import pytest\n"
        "from tests.support.fork_server import FailedImports\n"
        "words = ['test_a.py', '-q', '--collect-only', '--import-mode=importlib']\n"
        "assert pytest.main(words, plugins=[FailedImports()]) == 2\n"
        "assert pytest.main(words) == 2\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPO), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_that_come_first_are_there():
    assert [name for name in LONGEST if not (TESTS / name).exists()] == []
