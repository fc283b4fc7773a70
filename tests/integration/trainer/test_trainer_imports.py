"""What a trainer of a plain GRPO run imports: none of the files for what it does not have."""

import subprocess
import sys

from infra.docs.pages import REPO

OPTIONS = (
    "policy.adapters",
    "policy.compiling",
    "policy.fsdp",
    "policy.memory",
    "policy.routers",
    "policy.side_models",
    "policy.simulated_policy",
)


def test_a_plain_grpo_run_imports_no_option_of_a_policy():
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
    assert "tidemill.services.trainer.policy.transformers_policy" in modules
    for option in OPTIONS:
        assert not [name for name in modules if name.startswith(f"tidemill.services.trainer.{option}")]
