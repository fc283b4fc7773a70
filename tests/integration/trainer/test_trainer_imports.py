"""What a trainer of a plain GRPO run imports: none of the files for what it does not have."""

import importlib.util
import subprocess
import sys

from infra.docs.pages import REPO
from tidemill.services.trainer.policy.options import OPTIONS

NOT_PLAIN = {"fsdp", "memory", "simulated_policy"} | {
    row.implementation.partition(":")[0] for row in OPTIONS.values()
}
"""Of the rooms and files of `policy`."""
OTHER_OPTIONS = (
    "services.trainer.algorithm.advantages.teacher",
    "services.trainer.algorithm.advantages.users_advantage",
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
    "services.trainer.durable.retraining",
    "services.trainer.evaluation",
    "services.trainer.groups.pictures",
    "services.trainer.metrics.trackers",
    "services.trainer.policy.moving",
    "services.trainer.policy.profiling",
    "services.trainer.replay",
    "services.trainer.weights.object_publisher",
    "common.config.changes",
    "common.data.arrow_tables",
    "common.data.image_columns",
    "common.data.prompt_lengths",
    "common.images.pictures",
    "common.process.checks",
    "common.process.run_watch",
    "common.process.shortage",
    "common.process.users_code",
    "common.redis.cluster",
    "common.run.special_tokens",
    "common.store.objects",
    "common.streams.consumer",
    "common.weights.remote",
)
"""Other rooms and files: what a run has by a word of its config, or by its state."""
ALGORITHMS = {"dr_grpo", "grpo", "ppo"}
"""The files of `advantages/` and `losses/` that the default algorithm is made of."""


def test_a_plain_grpo_run_imports_no_option():
    done = subprocess.run(
        [sys.executable, "-m", "infra.trainer_imports", "--list"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    *rows, total = done.stdout.splitlines()
    modules = [row.split()[1] for row in rows]
    assert total.startswith(f"{len(modules)} files")
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
