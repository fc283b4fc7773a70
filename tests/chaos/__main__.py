"""A whole training run while its processes are killed at random, and the proof that nothing came of it.

    make chaos                            # one seed, 21 kills
    make chaos ARGS="--seeds 5"           # five seeds, one after the other
    make chaos ARGS="--sessions"          # sessions, their environments and server killed too
    make chaos ARGS="--tight"             # Redis keeps what is in flight; recovery from the archive
    make chaos ARGS="--set rollout.sampling.top_p=0.95"    # sampling masks, claimed and trained
    make chaos ARGS="--config examples/shapes/config.yaml"    # pictures; after `make demo-images`
    make chaos ARGS="--seed 7 --kills 40 --set trainer.steps=150"
    make chaos ARGS="--in-turn --set trainer.steps=30"     # each part once: what a crash costs

Runs the arith example as `tidemill up` does (Redis with an append-only file, trainer, two rollout and two
reward workers), kills -9 workers, trainer and Redis at random moments, starts them again after half a
second, has Redis lose its last writes, fail over to a replica that lags and lose power with everything else,
and has further workers join and leave. Then the history is judged from copies of the streams alone,
and every version is trained once more, undisturbed, and compared bit for bit.

Exits with 0 when nothing was lost, nothing trained twice, no bound violated, every digest equal, the archive
agrees with the copies entry by entry, though its writer was killed again and again, and every planned kill
came before the run's end.
"""

import asyncio
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.report import print_result
from tests.chaos.driver import torment
from tests.chaos.faults import KILLS, SESSION_KILLS, each_in_turn, plan
from tests.chaos.report import print_faults, result
from tests.support.servers import free_port
from tidemill.common.config import load_config
from tidemill.services.trainer.policy.transformers_policy import load_policy

ARITH = Path(__file__).resolve().parents[2] / "examples/arith/config.yaml"
OVERRIDES = (
    "rollout.workers=2", "reward.workers=2", "streams.lease_s=5", "trainer.loggers=[]",
    "streams.archive.segment_mb=0.05", "trainer.steps=75",
)  # fmt: skip
"""Of any config: with 75 steps, 21 kills come before the run's end."""
TIGHT = ("streams.archive.segment_mb=0.002", "trainer.checkpoint_every=25")
"""The smallest files: nothing waits to be archived. Few checkpoints: many steps are replayed."""
SESSIONS = (
    f"rollout.environment.use={Path(__file__).with_name('sums.py')}:Sums",
    "rollout.environment.max_turns=2",
    "rollout.environment.processes=2",
    "rollout.environment.call_timeout_s=20",
    "model.max_model_len=128",
    "reward={workers: 2, rewards: {environment: {environment: true}}}",
)
"""Two turns at most, in processes of environments that ask a server; their own reward is the score."""


def main(
    seed: Annotated[int, typer.Option(help="first seed of the faults")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="so many runs, with one seed after the other")] = 1,
    kills: Annotated[int, typer.Option(min=1, help="kill -9 so many times in each run")] = 21,
    in_turn: Annotated[bool, typer.Option("--in-turn", help="kill each part once, and nothing else")] = False,
    sessions: Annotated[bool, typer.Option("--sessions", help="play sessions with an environment")] = False,
    tight: Annotated[bool, typer.Option("--tight", help="trim at once, recover from the archive")] = False,
    config: Annotated[Path, typer.Option(help="the run's config, with 75 steps")] = ARITH,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="override a field")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="keep the runs' folders below this one")] = None,
) -> None:
    """Kill the processes of a whole run at random, and prove that its history is whole."""
    console = Console(stderr=True, highlight=False, markup=False)
    folder = keep or Path(tempfile.mkdtemp(prefix="tidemill-chaos-"))
    outcomes = []
    try:
        for number in range(seed, seed + seeds):
            name = f"chaos-{number}"
            address = f"rollout.environment.options.address=http://127.0.0.1:{free_port()}"
            of_sessions = (*SESSIONS, address) if sessions else ()
            settings = [
                *OVERRIDES,
                *(TIGHT if tight else ()),
                *of_sessions,
                *(overrides or ()),
                f"run_id={name}",
                f"seed={number}",
            ]
            home = folder / name
            home.mkdir(parents=True)
            run_config = load_config(config, settings)
            kinds = SESSION_KILLS if sessions else KILLS
            steps = run_config.trainer.steps
            faults = each_in_turn(steps) if in_turn else plan(number, kills, steps, kills=kinds)
            # Pictures are in the run's folder.
            load = partial(load_policy, run_dir=home / name)
            run = torment(home, run_config, faults, number, load, console.print)
            outcomes.append(asyncio.run(run))
            print_faults(outcomes[-1])
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print_result(result(outcomes))
    sys.exit(0 if all(outcome.is_good and not outcome.num_kills_left for outcome in outcomes) else 1)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
