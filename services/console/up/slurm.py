"""`tidemill slurm`: sbatch scripts for a run on a Slurm cluster. What a node does is `node.py`."""

import os
import re
import shlex
import sys
from pathlib import Path

from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.wire.keys import RUN_ID
from tidemill.services.console.check.preflight import examine
from tidemill.services.console.commands import SlurmOptions
from tidemill.services.console.run.folder import RunFolder, folder_of_runs, nearest, new_run_id

SIGNAL_S = 120
"""The job is asked to stop this long before its time limit, so that it can write a checkpoint."""
STOPPED = 130
"""Exit code of `tidemill up` when it was stopped and the run can go on."""
HEADER = """#!/bin/bash
# {what} of the run {run_id}; written by `tidemill slurm`. Add options of your cluster: partition, account.
#SBATCH --job-name={run_id}{suffix}
#SBATCH {size}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
"""
RUN = """#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@{signal_s}
{gpus}
cd {folder} || exit 2
export TIDEMILL_RUNS_DIR={runs}
srun --kill-on-bad-exit=0 {command}
code=$?
# Stopped and not finished: its time was over. The job begins again, and the run goes on.
if [ $code -eq {stopped} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""
JOIN = """
cd {folder} || exit 2
export TIDEMILL_RUNS_DIR={runs}
exec {command}
"""


def write_scripts(options: SlurmOptions) -> None:
    """Check the run, and write one script, or two."""
    config = examine(options.config, options.overrides).config
    run_id = options.run_id or config.run_id or new_run_id(options.config)
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"--run-id {run_id!r}: give letters, digits, '.', '_' or '-'")
    if not re.fullmatch(r"[0-9:-]+|UNLIMITED", options.time):
        raise ConfigError(f"--time {options.time!r} is none that Slurm knows; give 24:00:00 or 7-00:00:00")
    if options.gpus_per_node and config.trainer.num_ranks > options.gpus_per_node:
        raise ConfigError(
            f"trainer.num_ranks is {config.trainer.num_ranks}, and the first node has "
            f"{options.gpus_per_node} GPUs (--gpus-per-node): the script starts the ranks of one node. For "
            "several, start the trainer with torchrun: see services/trainer/README.md"
        )
    runs = folder_of_runs(options.runs_dir)
    words = [str(options.config.resolve()), "--run", run_id]
    for override in options.overrides:
        words += ["--set", override]
    words += ["--roles", "rollout"] if options.cpu_nodes else []
    texts = {f"{run_id}.sbatch": _script(options, run_id, runs, words, is_join=False)}
    if options.cpu_nodes:
        reward_command = [*words[:-2], "--node", "-1", "--roles", "reward"]
        texts[f"{run_id}.rewards.sbatch"] = _script(options, run_id, runs, reward_command, is_join=True)
    runs.mkdir(parents=True, exist_ok=True)
    _write(options, texts)
    print(f"then: {RunFolder(runs, run_id).command('status', '--watch')}", file=sys.stderr)


def _write(options: SlurmOptions, texts: dict[str, str]) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (options.output / name).write_text(text)
        print(f"sbatch {shlex.quote(nearest((options.output / name).resolve()))}")


def _script(options: SlurmOptions, run_id: str, runs: Path, words: list[str], *, is_join: bool) -> str:
    gpus = f"#SBATCH --gpus-per-node={options.gpus_per_node}\n" if options.gpus_per_node else ""
    values = {
        "run_id": run_id,
        "what": "Reward workers" if is_join else "The nodes",
        "suffix": "-rewards" if is_join else "",
        "size": f"--array=1-{options.cpu_nodes}" if is_join else f"--nodes={options.nodes}",
        "time": options.time,
        "log": shlex.quote(str(runs / f"{run_id}.{'rewards.%a' if is_join else 'slurm'}.log")),
        "signal_s": SIGNAL_S,
        "gpus": gpus,
        "folder": shlex.quote(os.getcwd()),
        "runs": shlex.quote(str(runs)),
        "command": shlex.join(run_own(Program.NODE, *words)),
        "stopped": STOPPED,
    }
    return (HEADER + (JOIN if is_join else RUN)).format(**values)
