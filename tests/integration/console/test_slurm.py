"""`tidemill slurm` with a real Slurm: the script does a run, which survives a drained node and a requeue."""

import json
import shlex
from pathlib import Path

import pytest

from tests.support.recorded import tidemill
from tests.support.servers import free_port
from tests.support.slurm import Slurm, is_installed
from tests.support.waiting import wait_until
from tidemill.common.run.state import METRICS_FILE, STEP, read_records

REPO = Path(__file__).resolve().parents[3]
SETTINGS = ("trainer.steps=30", "trainer.groups_per_step=4", "trainer.group_size=8", "expect.eval_gain=null")


def written(tmp_path: Path, *words: str) -> str:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    done = tidemill(
        tmp_path / "our runs",
        *(
            "slurm",
            str(REPO / "examples/arith/config.yaml"),
            "--run-id",
            "demo",
            "-o",
            str(tmp_path / "our scripts"),
        ),
        *settings,
        *words,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scripts_say_what_slurm_has_to_know(tmp_path: Path) -> None:
    printed = written(
        tmp_path, "--nodes", "3", "--gpus-per-node", "8", "--cpu-nodes", "2", "--time", "7-00:00:00"
    )
    typed = [shlex.split(line) for line in printed.splitlines()]
    assert [words[0] for words in typed] == ["sbatch"] * 2
    assert [Path(words[1]).name for words in typed] == ["demo.sbatch", "demo.rewards.sbatch"]
    nodes = (tmp_path / "our scripts" / "demo.sbatch").read_text()
    rewards = (tmp_path / "our scripts" / "demo.rewards.sbatch").read_text()
    for line in (
        "nodes=3",
        "ntasks-per-node=1",
        "gpus-per-node=8",
        "time=7-00:00:00",
        "requeue",
        "signal=TERM@120",
    ):
        assert f"\n#SBATCH --{line}\n" in nodes, line
    for text, name in ((nodes, "demo.slurm.log"), (rewards, "demo.rewards.%a.log")):
        assert f"--output={tmp_path}/our runs/{name}" in [
            word for line in text.splitlines() if "--output" in line for word in shlex.split(line[1:])
        ]
    assert nodes.count("--roles rollout") == 1 and "gpus" not in rewards
    assert "\n#SBATCH --array=1-2\n" in rewards and "--node -1 --roles reward" in rewards


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--set", "trainer.num_ranks=16", "--gpus-per-node", "8"), "torchrun"),
        (("--time", "tomorrow"), "--time"),
        (("--run-id", "a/b"), "--run-id"),
        (("--set", "trainer.stepz=1"), "stepz"),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_written(tmp_path, words, named):
    output = tmp_path / "scripts"
    config = str(REPO / "examples/arith/config.yaml")
    done = tidemill(tmp_path / "runs", "slurm", config, "-o", str(output), *words)
    assert done.returncode == 2 and named in done.stderr, done.stderr
    assert not output.exists()
    output.touch()  # no folder
    done = tidemill(tmp_path / "runs", "slurm", config, "-o", str(output))
    assert done.returncode == 2 and str(output) in done.stderr, done.stderr


@pytest.mark.skipif(
    not is_installed(), reason="no Slurm that this user may start (apt install slurmd slurmctld)"
)
async def test_a_run_goes_on_where_a_node_is_drained_and_its_job_requeued(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_LISTEN", f"127.0.0.1:{free_port()}")
    written(tmp_path)
    run = tmp_path / "our runs" / "demo"

    def steps() -> int:
        return sum(record["kind"] == STEP for record in read_records(run / METRICS_FILE))

    with Slurm(tmp_path, 3).running() as slurm:
        await wait_until(lambda: slurm.call("sinfo", "-h", "-o", "%D", "-t", "idle").strip() == "3")
        job = slurm.call("sbatch", "--parsable", str(tmp_path / "our scripts" / "demo.sbatch")).strip()
        assert job, (tmp_path / "daemons.log").read_text()[-2000:]
        await wait_until(lambda: steps() >= 3)
        slurm.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=repair")
        slurm.call("scontrol", "requeue", job)
        await wait_until(lambda: "PENDING" in slurm.call("scontrol", "show", "job", job))
        before = steps()
        assert 3 <= before < 30, "it was stopped in the middle"
        # Slurm waits two minutes before it starts a requeued job, unless it is told otherwise.
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        await wait_until(lambda: (run / "summary.json").exists())
        await wait_until(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job))
        output = slurm.call("scontrol", "show", "job", job)
    assert "Restarts=1" in output and "NodeList=n[1,3]" in output, output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["lost"], summary["duplicated_in_training"]) == (0, 0)
    assert steps() == 30 and summary["trajectories_trained"] >= 30 * 4 * 8
    workers = {path.name for path in (run / "logs").iterdir() if path.name.startswith("rollout")}
    assert {name.rpartition("-")[2] for name in workers} == {"n2.log", "n3.log"}
    assert not (run / "redis.url").is_file()
    assert (run.parent / "demo.slurm.log").exists()
