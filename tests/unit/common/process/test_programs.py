"""The registry of programs: every name leads somewhere and lies nowhere else."""

import ast
import asyncio
import importlib.util
import re
from pathlib import Path

import pytest

from tidemill.common.process.programs import ROOT, RUN_CODE, VLLM_EXTENSION, Program, run_main

REGISTRY = ROOT / "common" / "process" / "programs.py"
QUOTED = re.compile(r"[\"']tidemill\.(services|common)\.")
MODULE = re.compile(r"tidemill\.(services|common)(\.[A-Za-z_]\w*)+")


def files_of(pattern: str) -> list[Path]:
    return [path for room in ("common", "services") for path in sorted((ROOT / room).rglob(pattern))]


def names_in(path: Path) -> set[str]:
    """All strings of a file that are a dotted name of ours and nothing else."""
    source = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source)) if QUOTED.search(source) else ()
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if MODULE.fullmatch(text)}


@pytest.mark.parametrize("program", Program)
def test_every_program_is_a_module_that_can_be_run(program):
    spec = importlib.util.find_spec(program)
    assert spec is not None
    if spec.submodule_search_locations is None:
        assert '__name__ == "__main__"' in Path(str(spec.origin)).read_text(encoding="utf-8")
    else:
        assert importlib.util.find_spec(f"{program}.__main__") is not None


def test_what_vllm_asks_for_is_where_its_name_says():
    module, _, name = VLLM_EXTENSION.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_jobs_are_named_as_workers_of_earlier_releases_name_them():
    assert RUN_CODE == "tidemill.services.jobs.sandbox.job.run_code"


def test_no_other_file_names_a_module_in_a_string():
    elsewhere = {}
    for path in files_of("*.py"):
        names = names_in(path)
        if path != REGISTRY and names:
            elsewhere[str(path.relative_to(ROOT))] = names
    assert not elsewhere, "give these a line in common/process/programs.py"


def test_images_start_what_the_registry_or_a_package_offers():
    for path in files_of("Dockerfile"):
        for name in MODULE.finditer("\n".join(re.findall(r"^ENTRYPOINT .*", path.read_text(), re.MULTILINE))):
            assert importlib.util.find_spec(f"{name[0]}") is not None, f"{path} starts {name[0]}"


class Large:
    """Stands for the records of a run, whose words take minutes and gigabytes. Counts who asks for them."""

    num_asked = 0

    def __repr__(self) -> str:
        self.num_asked += 1
        return "words"


def test_a_result_is_returned_without_being_put_into_words():
    result = Large()

    async def work():
        await asyncio.sleep(0)
        return result

    assert run_main(work()) is result
    assert result.num_asked == 0


def test_an_error_is_raised_as_it_is():
    async def work():
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        run_main(work())
