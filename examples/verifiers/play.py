"""Plays one rollout of a verifiers environment by its own runner, as the agent program of a session.

    python play.py rows TASKSET > train.jsonl      the taskset as a dataset
    python play.py TASKSET [options of vf-eval]    the command of `rollout.environment.agent`

For the interpreter of the virtual environment that has `verifiers` and the taskset.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def print_rows(taskset: str) -> None:
    """One row for each task: its prompt, and its place in the taskset, by which it is found again."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    for task in load_taskset(taskset_config_type(taskset)(id=taskset)):
        print(json.dumps({"prompt": task.data.prompt_text, "task": task.data.idx}))


def play(row: dict[str, Any], taskset: str, *options: str) -> dict[str, Any]:
    """Reward and metrics of the row's task. Exits where there are none: a rollout that failed is no 0."""
    if "task" not in row:
        sys.exit("the row has no column `task`; make the dataset with: play.py rows TASKSET")
    programs = Path(sys.executable).parent
    options = ("--model", os.environ["TIDEMILL_MODEL"], "--client.api-key-var", "OPENAI_API_KEY", *options)
    options = ("--client.base-url", os.environ["OPENAI_BASE_URL"], "--no-push", "--no-rich", *options)
    with tempfile.TemporaryDirectory() as folder:
        command = [programs / "vf-eval", taskset, "--select.include.idx", str(row["task"]), *options]
        path = f"{programs}:{os.environ['PATH']}"  # the runner looks for `uv`
        done = subprocess.run(
            [*command, "--output-dir", folder], stdout=subprocess.DEVNULL, env=os.environ | {"PATH": path}
        )
        if done.returncode:
            sys.exit(done.returncode)
        lines = [line for file in Path(folder).glob("*/traces.jsonl") for line in file.open()]
    if len(lines) != 1:
        sys.exit(f"expected one rollout of task {row['task']}, got {len(lines)}")
    return result_of(json.loads(lines[0]))


def result_of(episode: dict[str, Any]) -> dict[str, Any]:
    """That of the agent that is trained."""
    played = episode["traces"]
    trained = [trace for trace in played if trace["agent"]["trainable"]]
    if not episode["ok"] or not all(trace["ok"] for trace in played):
        errors = [error for record in (episode, *played) for error in record["errors"]]
        sys.exit(f"the rollout failed: {errors[-1]['message'] if errors else 'without a reason'}")
    if len(trained) != 1:
        sys.exit(f"{len(trained)} agents of the environment are trained; a session has one reward")
    (trace,) = trained
    if not trace["rewards"]:
        sys.exit("the rollout has no reward: the environment has computed none")
    scores = {}
    total = 0.0
    for name, reward in trace["rewards"].items():
        score = (reward or {}).get("score")
        # `ok` does not say that there are scores: a late scoring leaves none, and NaN is written as null.
        if not isinstance(score, int | float) or not math.isfinite(score):
            reason = trace.get("stop_condition") or "without a reason"
            sys.exit(f"the rollout has no reward: {name} is {score} ({reason})")
        scores[name] = score
        total += score * reward["weight"]
    metrics = {name: value for name, value in trace["metrics"].items() if value is not None}
    # Whether the engine was slow, or the policy, is what the session's worker knows.
    is_late = trace.get("stop_condition") == "agent_timeout"
    return {"reward": total, "metrics": metrics | scores, "timeout": is_late}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        print_rows(*sys.argv[2:])
    else:
        print(json.dumps(play(json.load(sys.stdin), *sys.argv[1:])))
