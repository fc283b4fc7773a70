"""What a trainer of a plain GRPO run imports: none of the files for what it does not have."""

import subprocess
import sys

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
    assert "tidemill.common.streams.consumer" not in modules
    for option in OTHER_OPTIONS:
        assert not [name for name in modules if name.startswith(f"tidemill.services.trainer.{option}")]
    policy = "tidemill.services.trainer.policy."
    of_policy = {name.removeprefix(policy).partition(".")[0] for name in modules if name.startswith(policy)}
    assert "transformers_policy" in of_policy
    assert not of_policy & NOT_PLAIN
