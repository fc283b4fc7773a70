"""What a reward that fails does to a run: three runs of one config, which differ in what a failure means.

    make demo-outage          # python -m examples.outage.compare, from the root of the repository

Prints a line for each evaluation, then a table; draws the held-out accuracy of the three runs into one
picture. The last line is JSON: `before`, `after` and `lost` of each run.
"""

import argparse
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tidemill
from benchmarks.report import machine, print_result, print_table
from tidemill.services.console.look.plots import plot_evaluations
from tidemill.services.console.run.folder import folder_of_runs

CONFIG = Path(__file__).with_name("config.yaml")
LIMITS = "reward.rewards.tests"
ARMS: dict[str, dict[str, Any]] = {
    "zeros": {f"{LIMITS}.max_attempts": 1, f"{LIMITS}.on_failure": 0.0},
    "left_out": {f"{LIMITS}.max_attempts": 1},
    "attempts": {},
}
"""What each run changes in the config, which is that of the last one."""
LABELS = {
    "zeros": "a failure scores 0",
    "left_out": "a failure is left out",
    "attempts": "three attempts, then left out",
}


def run_arm(arm: str, overrides: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    """The summary of one run, which says how its evaluations go meanwhile."""
    print(f"{LABELS[arm]}: starts", flush=True)
    result = tidemill.run(
        CONFIG,
        {**ARMS[arm], **overrides},
        run_id=f"outage-{arm}-{time.strftime('%Y%m%d-%H%M%S')}",
        runs_dir=runs_dir,
        on_evaluation=partial(print_evaluation, arm),
        quiet=True,
    )
    if not result.summary:
        raise SystemExit(result.why_not_finished)
    if problems := result.summary["failures"]:
        raise SystemExit(f"{result.folder}: {'; '.join(problems)}")
    return result.summary


def print_evaluation(arm: str, record: Mapping[str, Any]) -> None:
    """Say what the model of a version knows."""
    print(f"{LABELS[arm]}: step {record['version']}, held out {record['score']:.3f}", flush=True)


def row_of(arm: str, summary: Mapping[str, Any]) -> tuple[object, ...]:
    """A run's line of the table."""
    before = f"{summary['eval_before']:.3f}"
    after = f"{summary['eval_after']:.3f}"
    left_out = sum(summary["dropped"].values())
    trained = f"{summary['trajectories_trained']:,}"
    return LABELS[arm], before, after, trained, f"{left_out:,}", summary["lost"], f"{summary['wall_s']:.0f}"


def result_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's part of the last line."""
    return {
        "before": round(summary["eval_before"], 4),
        "after": round(summary["eval_after"], 4),
        "lost": summary["lost"],
    }


def curve_of(summary: Mapping[str, Any]) -> dict[int, float]:
    """Held-out accuracy by version."""
    return {record["version"]: record["score"] for record in summary["evaluations"]}


def main() -> None:
    """Do the runs one after the other, then compare them."""
    parser = argparse.ArgumentParser(description="What a reward that fails does to a run.")
    parser.add_argument(
        "--picture", type=Path, help="where to draw it; default: outage.png in the folder of runs"
    )
    parser.add_argument("--runs-dir", type=Path, help="default: TIDEMILL_RUNS_DIR, else runs")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    # Each run has a Redis of its own: what it measures is no one else's.
    os.environ.pop("TIDEMILL_REDIS_URL", None)
    runs_dir = folder_of_runs(options.runs_dir)
    overrides = dict(override.split("=", 1) for override in options.overrides)
    summaries = {arm: run_arm(arm, overrides, runs_dir) for arm in ARMS}
    picture = options.picture or runs_dir / "outage.png"
    plot_evaluations({LABELS[arm]: curve_of(summary) for arm, summary in summaries.items()}, picture)
    rows = [row_of(arm, summary) for arm, summary in summaries.items()]
    columns = "what a failure means,held out before,after,samples trained,left out,lost,seconds"
    print_table("A reward that fails on 80% of right answers", columns, rows, machine())
    print(f"picture: {picture}")
    print_result({arm: result_of(summary) for arm, summary in summaries.items()})


if __name__ == "__main__":
    main()
