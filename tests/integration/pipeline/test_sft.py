"""The example of demonstrations in short, by `tidemill up`: fine-tuning, then rewards, then its successes as
demonstrations of another run, which has no workers."""

import json
from pathlib import Path

from tests.support import preloaded
from tests.support.preloaded import REPO
from tidemill.common.run.state import METRICS_FILE, STEP, read_records
from tidemill.common.wire.messages import FIRST_DEMONSTRATION

CONFIG = str(REPO / "examples/sft/config.yaml")
SHORT = {
    "trainer.steps": "9",
    "trainer.groups_per_step": "16",
    "trainer.group_size": "4",
    "trainer.checkpoint_every": "4",
    "trainer.loggers": "[]",
    "data.eval": "{}",
    "expect.eval_gain": "null",
}


def up(run_id: str, runs: Path, **data: str) -> list[dict[str, float]]:
    """The numbers of each step of a run."""
    settings = SHORT | {f"data.{name}": value for name, value in data.items()}
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = preloaded.tidemill(
        "up", CONFIG, "--no-live", "--run-id", run_id, *changes, TIDEMILL_RUNS_DIR=str(runs)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [record for record in read_records(runs / run_id / METRICS_FILE) if record["kind"] == STEP]


def test_from_demonstrations_to_rewards_to_demonstrations(tmp_path: Path) -> None:
    path = f"path: {REPO}/examples/sft/demonstrations.jsonl"
    shown = f"{{name: shown, kind: demonstrations, {path}, weight: 1000000, epochs: 1}}"
    sums = f"{{name: sums, path: {REPO}/examples/arith/train.jsonl}}"
    steps = up("first", tmp_path, max_rows="96", train=f"[{shown}, {sums}]")
    shares = [step.get("imitation/token_share", 0.0) for step in steps]
    assert shares == [1.0] * 6 + [0.0] * 3, "96 rows in batches of 16"
    assert ["reward" in step for step in steps] == [False] * 6 + [True] * 3
    assert steps[5]["loss"] < steps[0]["loss"]

    best = f"[{{name: best, kind: demonstrations, path: {tmp_path}/first, min_reward: 1.0}}]"
    steps = up("second", tmp_path, train=best)
    assert len(steps) == 9 and all(step["imitation/token_share"] == 1.0 for step in steps)
    logs = {path.stem for path in (tmp_path / "second/logs").iterdir()}
    assert not any(name.startswith(("rollout", "reward")) for name in logs), logs

    environment = {"TIDEMILL_RUNS_DIR": str(tmp_path)}
    for run_id in ("first", "second"):
        done = preloaded.tidemill("replay", "0,5,8", run_id, "--json", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [result["equal"] for result in json.loads(done.stdout)] == [True] * 3
    done = preloaded.tidemill("trace", f"{FIRST_DEMONSTRATION}.0", "second", **environment)
    assert done.returncode == 0 and "a demonstration" in done.stdout, done.stdout + done.stderr
