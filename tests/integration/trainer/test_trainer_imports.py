"""What processes import: none of the files for what their run does not have."""

import importlib.util
import subprocess
import sys

import pytest

from infra.docs.pages import REPO
from tidemill.services.trainer.policy.options import OPTIONS

NOT_PLAIN = {"fsdp", "memory", "simulated_policy"} | {
    row.implementation.partition(":")[0] for row in OPTIONS.values()
}
"""Of the rooms and files of `policy`."""
OTHER_OPTIONS = (
    "services.trainer.algorithm.advantages.shaping",
    "services.trainer.algorithm.advantages.teacher",
    "services.trainer.algorithm.advantages.users_advantage",
    "services.trainer.algorithm.coefficients",
    "services.trainer.algorithm.losses.mini_batch",
    "services.trainer.algorithm.losses.rejection",
    "services.trainer.algorithm.losses.routing",
    "services.trainer.algorithm.losses.terms",
    "services.trainer.algorithm.losses.users_loss",
    "services.trainer.algorithm.users_function",
    "services.trainer.batch.curriculum",
    "services.trainer.batch.demonstrations",
    "services.trainer.batch.mixture",
    "services.trainer.batch.row_pictures",
    "services.trainer.batch.streamed_prompts",
    "services.trainer.durable.retraining",
    "services.trainer.evaluation",
    "services.trainer.groups.choices",
    "services.trainer.groups.pictures",
    "services.trainer.metrics.option_metrics",
    "services.trainer.metrics.trackers",
    "services.trainer.policy.kept_ids",
    "services.trainer.policy.moving",
    "services.trainer.policy.profiling",
    "services.trainer.policy.tower_flops",
    "services.trainer.replay",
    "services.trainer.weights.best_version",
    "services.trainer.weights.object_publisher",
    "services.trainer.weights.pretrained",
    "common.config.algorithms.moved",
    "common.config.changes",
    "common.config.images",
    "common.config.reward_kinds",
    "common.config.rules",
    "common.config.servers",
    "common.config.sources",
    "common.data.arrow_tables",
    "common.data.demonstration",
    "common.data.image_columns",
    "common.data.prompt_lengths",
    "common.data.streamed_rows",
    "common.data.text_tables",
    "common.data.users_rows",
    "common.history",
    "common.images.pictures",
    "common.process.checks",
    "common.process.run_watch",
    "common.process.shortage",
    "common.process.users_code",
    "common.redis.blocking_client",
    "common.redis.cluster",
    "common.redis.lease_scripts",
    "common.redis.reward_scripts",
    "common.redis.several_hosts",
    "common.run.special_tokens",
    "common.store",
    "common.streams.backlog",
    "common.streams.consumer",
    "common.streams.references",
    "common.streams.requeueing",
    "common.streams.selection",
    "common.weights.delta",
    "common.weights.remote",
    "common.wire.routes",
)
"""Other rooms and files: what a run has by a word of its config, or by its state."""
ALGORITHMS = {"dr_grpo", "grpo", "ppo"}
"""The files of `advantages/` and `losses/` that the default algorithm is made of."""
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
    for option in OTHER_OPTIONS:
        name = f"tidemill.{option}"
        assert importlib.util.find_spec(name), "or the test would see nothing"
        assert not [module for module in modules if f"{module}.".startswith(f"{name}.")]
    algorithms = "tidemill.common.config.algorithms."
    of_folders = (f"{algorithms}advantages.", f"{algorithms}losses.")
    assert {name.rpartition(".")[2] for name in modules if name.startswith(of_folders)} == ALGORITHMS
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
