"""The same run with several seeds: `python examples/python/sweep.py CONFIG --seeds 3 --set FIELD=VALUE`.

One run after the other; what is there already is read and not done again. Prints the reward of every step as
its mean over the seeds and their standard deviation.
"""

import argparse
import statistics
from pathlib import Path

import tidemill


def main() -> None:
    """Do the runs that are missing, then compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    options = parser.parse_args()
    curves = [curve_of(options, f"sweep-seed-{seed}", seed) for seed in range(options.seeds)]
    for step, rewards in enumerate(zip(*curves, strict=True)):
        spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        print(f"step {step}  reward {statistics.fmean(rewards):.3f}  std over seeds {spread:.3f}")


def curve_of(options: argparse.Namespace, run_id: str, seed: int) -> list[float]:
    """The rewards of one run's steps."""
    folder = options.runs_dir / run_id
    if not (folder / "summary.json").exists():
        overrides = [*options.overrides, f"seed={seed}"]
        result = tidemill.run(
            options.config,
            overrides,
            run_id=run_id,
            runs_dir=options.runs_dir,
            resume=folder.exists(),
            quiet=True,
        )
        if not result.summary:
            raise SystemExit(result.why_not_finished)
    return [record["reward"] for record in tidemill.metrics(run_id, options.runs_dir)]


if __name__ == "__main__":
    main()
