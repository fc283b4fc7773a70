"""What processes import: none of the files for what their run does not have."""

import subprocess
import sys

import pytest

from infra.docs.pages import REPO
from tidemill.services.trainer.policy.options import OPTIONS

NOT_PLAIN = {"fsdp", "memory", "simulated_policy"} | {
    row.implementation.partition(":")[0] for row in OPTIONS.values()
}
"""Of the rooms and files of `policy`."""
OTHER_OPTIONS = {
    "batch.demonstrations",
    "batch.row_pictures",
    "groups.pictures",
    "metrics.trackers",
    "replay",
}
"""Other rooms and files of the trainer."""
OF_PICTURES = ("door", "fetching", "processor")
"""Modules of `common/images` that only runs with pictures need."""


PROGRAM = """
import sys
from infra import trainer_imports

trainer_imports.main(["--list"])
import tidemill.services.trainer.policy.memory.fit

print(*sys.modules)
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What one process prints: the files that it holds; last all modules, with what fits passes to a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPO, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.fixture
def modules(lines: list[str]) -> list[str]:
    """Of a trainer of a plain GRPO run."""
    *rows, total, _ = lines
    modules = [row.split()[1] for row in rows]
    assert total.startswith(f"{len(modules)} files")
    return modules


def test_a_plain_grpo_run_imports_no_option(modules: list[str]) -> None:
    assert "tidemill.common.streams.consumer" not in modules
    for option in OTHER_OPTIONS:
        assert not [name for name in modules if name.startswith(f"tidemill.services.trainer.{option}")]
    policy = "tidemill.services.trainer.policy."
    of_policy = {name.removeprefix(policy).partition(".")[0] for name in modules if name.startswith(policy)}
    assert "transformers_policy" in of_policy
    assert not of_policy & NOT_PLAIN


def test_a_trainer_of_a_text_run_loads_nothing_that_takes_pictures_in(modules: list[str]) -> None:
    assert "tidemill.services.trainer.batch.prompts" in modules
    assert not {f"tidemill.common.images.{name}" for name in OF_PICTURES} & set(modules)
    assert "tidemill.services.trainer.batch.row_pictures" not in modules


def test_who_fits_passes_to_a_gpu_does_not_import_the_search_for_settings(lines: list[str]) -> None:
    modules = lines[-1].split()
    assert "tidemill.services.trainer.policy.memory.estimate" in modules
    assert "tidemill.services.trainer.policy.memory.advice" not in modules


def test_what_reads_rows_of_text_loads_neither_pillow_nor_what_takes_pictures_in() -> None:
    names = "tidemill.common.data.prompt_lengths, tidemill.services.console.check.model_folder"
    program = f"import sys, {names}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "PIL" not in loaded
    assert not {f"tidemill.common.images.{name}" for name in OF_PICTURES} & set(loaded)
