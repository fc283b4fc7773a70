"""The commands that `infra/docs/commands.yml` has under `run`, one after the other, in one folder.

Some of each kind start as users start them, and so do all that need a shell or are not of the package. The
others are forked from a process that has imported what is heavy.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.docs.commands import table
from tests.support.preloaded import run_module

ROOT = Path(__file__).parents[3]
SMALL = {"steps": 3, "groups_per_step": 4, "group_size": 4, "checkpoint_every": 3}
"""A run of seconds."""
SCRIPT = (
    "train_batch_size=64\npython -m verl.trainer.main_ppo data.train_batch_size=$train_batch_size \\\n  {}\n"
)
VERL = (
    "actor_rollout_ref.model.path=${MODEL_PATH:-model} data.train_files=train.jsonl data.val_files=eval.jsonl"
    " algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.max_prompt_length=32"
    " data.max_response_length=16 trainer.total_training_steps=3"
)
TRL = """
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(num_generations=4, max_prompt_length=32, max_completion_length=16, max_steps=3)
GRPOTrainer(model="model", args=args, train_dataset="train.jsonl", reward_funcs="reward.py:f")
"""
PRIME = """
max_steps = 3
[model]
name = "model"
[orchestrator]
batch_size = 64
rollouts_per_example = 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a reader has: a clone's files, a config of his own, and files of other projects."""
    for name in ("benchmarks", "examples", "infra", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("model", "train.jsonl"):
        (tmp_path / name).symlink_to(ROOT / "examples" / "arith" / name)
    config = yaml.safe_load((ROOT / "examples" / "arith" / "config.yaml").read_text())
    config["trainer"] |= SMALL | {"evaluation": {"every": 0}}
    del config["expect"], config["data"]["eval"]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "run_grpo.sh").write_text(SCRIPT.format(VERL))
    (tmp_path / "train.py").write_text(TRL)
    (tmp_path / "rl.toml").write_text(PRIME)
    return tmp_path


FROM_NOTHING = ("tidemill up ", "tidemill check examples", "tidemill status", "tidemill convert rl.toml")
SHELL = set("|><&;$*~")


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """One command to its end, in `folder`."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    words = shlex.split(command)
    module = {"tidemill": "tidemill.services.console"}.get(words[0], "")
    if words[:2] == ["python", "-m"]:
        module = words[2]
        words = words[2:]
    is_cold = not module or SHELL & set(command) or command.startswith(FROM_NOTHING)
    if not is_cold:
        return run_module(module, words[1:], variables | {"COLUMNS": "100"}, folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables |= {"PYTHONPATH": str(ROOT), "PATH": path, "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.timeout(900)  # a whole run and some thirty commands, on a busy machine
def test_commands_of_the_pages_do_what_they_say(folder: Path) -> None:
    failed = {}
    for command in [fate.run for fate in table().values() if fate.run]:
        (folder / "config.yaml").unlink(missing_ok=True)
        done = run(command, folder)
        if done.returncode:
            failed[command] = f"{done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    assert failed == {}
    assert (folder / "runs/arith-1/metrics.jsonl").read_text().count('"kind": "step"') == SMALL["steps"]
    assert (folder / "node.env").read_text().count("PASSWORD=") == 2
