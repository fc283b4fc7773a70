"""How much of the reward's and the rollout's time the trainer hides: the experiment of verl #2854.

    python -m benchmarks.overlap                     # k = 0 and 1, early start off and on
    python -m benchmarks.overlap --consumers 1,2,4,8 # and how many reward consumers that takes

Real services as processes on a real Redis; only the work itself is simulated, with the delays of the
original (8 x H20, 7B, batch 1024 x 5, rewards of 1 to 40 s) divided by `--scale`, and its batch and its
256 reward slots divided by `--shrink`. Stage times of the original, in seconds: generation 40, old
logprobs 46, reference 37, update 127.

Step time is the median over steps, without the first `--warm-up` ones. `ratio` is step time over the
busy time of the slowest stage: trainer (measured), generation, or reward (samples x mean delay / slots).
"""

import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import machine, print_result, print_table
from common.messages import Commit
from common.presence import read_heartbeats
from common.streams import Entry, read_range
from tests.runs import ServiceRun, simulated_config

GENERATION_S, TRAINING_S = 40.0, 46.0 + 37.0 + 127.0
REWARD_S = (1.0, 40.0)
GROUPS, GROUP_SIZE, REWARD_SLOTS = 1024, 5, 256
PUBLISHED_SAVING = {"mini-batch": 0.123, "one step": 0.252, "both": 0.309}


@dataclass(frozen=True)
class Setting:
    """One row: staleness bound, early start, reward consumers."""

    name: str
    max_staleness: int
    start_early: bool
    consumers: int


@dataclass(frozen=True)
class Outcome:
    """What one row measured; times in seconds, shares of the wall time after warm-up."""

    step_s: float
    trainer_idle: float
    rollout_idle: float
    slowest_stage: str
    ratio: float


async def measure(setting: Setting, scale: float, shrink: int, steps: int, warm_up: int) -> Outcome:
    """Run one setting to its end."""
    groups, slots = GROUPS // shrink, REWARD_SLOTS // shrink
    with tempfile.TemporaryDirectory() as folder:
        config = simulated_config(
            Path(folder),
            trainer__steps=steps,
            trainer__groups_per_step=groups,
            trainer__group_size=GROUP_SIZE,
            trainer__max_staleness=setting.max_staleness,
            trainer__start_early=setting.start_early,
            trainer__micro_batch_tokens=max(64, groups * GROUP_SIZE * 20 // 32),
            trainer__simulated={"group_s": TRAINING_S / scale / groups},
            trainer__checkpoint_every=1000,
            rollout__simulated={
                "group_s": GENERATION_S / scale / 2,
                "jitter": 1.0,
                "tokens": 16,
                "vocab_size": 32,
                "capacity": groups * GROUP_SIZE,
            },
            rollout__max_groups_in_flight=groups,
            reward__function="exact_match",
            reward__delay_s=(REWARD_S[0] / scale, REWARD_S[1] / scale),
            reward__max_in_flight=slots,
            streams__lease_s=60.0,
        )
        async with ServiceRun(Path(folder), config) as run:
            for role in ("trainer", "rollout"):
                run.start(role)
            for number in range(setting.consumers):
                run.start("reward", f"reward-{number}")
            if await run.wait("trainer", 900) != 0:
                raise RuntimeError(f"the trainer failed:\n{run.log_of('trainer')[-2000:]}")
            entries = await read_range(run.broker, run.keys.commits, Commit)
            beats = await read_heartbeats(run.broker, run.keys)
    commits = [entry.message for entry in entries if isinstance(entry, Entry)]
    rollout_idle = next(beat.idle_share for beat in beats if beat.role == "rollout")
    return _outcome(setting, commits[warm_up:], rollout_idle, scale, groups, slots)


def _outcome(
    setting: Setting, commits: list[Commit], rollout_idle: float, scale: float, groups: int, slots: int
) -> Outcome:
    step_s = statistics.median(commit.metrics["step_time_s"] for commit in commits)
    waited = [
        sum(value for name, value in commit.metrics.items() if name.startswith("time/wait_"))
        for commit in commits
    ]
    total = sum(commit.metrics["step_time_s"] for commit in commits)
    busy = [commit.metrics["time/train_s"] + commit.metrics["time/update_s"] for commit in commits]
    mean_reward_s = sum(REWARD_S) / 2 / scale
    stages = {
        "trainer": statistics.median(busy),
        "rollout": GENERATION_S / scale,
        "reward": groups * GROUP_SIZE * mean_reward_s / (setting.consumers * slots),
    }
    slowest = max(stages, key=lambda name: stages[name])
    return Outcome(step_s, sum(waited) / total, rollout_idle, slowest, step_s / stages[slowest])


def main(
    scale: Annotated[float, typer.Option(help="divide all delays by this")] = 40.0,
    shrink: Annotated[int, typer.Option(help="divide batch and reward slots by this")] = 4,
    steps: Annotated[int, typer.Option(help="steps of each run")] = 8,
    warm_up: Annotated[int, typer.Option(help="steps left out at the start")] = 2,
    consumers: Annotated[str, typer.Option(help="reward consumers, such as 1,2,4,8")] = "4",
) -> None:
    """Compare on-policy and one step off-policy, with and without early start."""
    counts = [int(count) for count in consumers.split(",")]
    modes = (("baseline", 0, False), ("mini-batch", 0, True), ("one step", 1, False), ("both", 1, True))
    settings = [Setting(name, k, early, count) for count in counts for name, k, early in modes]
    outcomes: dict[Setting, Outcome] = {}
    for setting in settings:
        print(f"running: {setting.name}, {setting.consumers} reward consumer(s)", flush=True)
        outcomes[setting] = asyncio.run(measure(setting, scale, shrink, steps, warm_up))
    baseline = outcomes[settings[0]]
    rows = [_row(setting, outcomes[setting], baseline) for setting in settings]
    columns = (
        "mode",
        "k",
        "consumers",
        "step s",
        "saving",
        "theirs",
        "trainer idle",
        "rollout idle",
        "slowest",
        "ratio",
    )
    note = f"{machine()}. Delays / {scale:g}, batch / {shrink}. Saving is against the first row."
    print_table("Overlap: the experiment of verl #2854", columns, rows, note)
    savings = {mode: _best_saving(mode, outcomes, baseline) for mode, _, _ in modes[1:]}
    best = min((o for s, o in outcomes.items() if s.name == "both"), key=lambda outcome: outcome.step_s)
    print_result(
        {
            "saving_minibatch": round(savings["mini-batch"], 4),
            "saving_one_step": round(savings["one step"], 4),
            "saving_both": round(savings["both"], 4),
            "trainer_idle_share": round(best.trainer_idle, 4),
            "rollout_idle_share": round(best.rollout_idle, 4),
            "step_s_k0": round(baseline.step_s, 3),
            "step_s_k1": round(best.step_s, 3),
            "ratio_to_slowest_stage": round(best.ratio, 4),
        }
    )


def _row(setting: Setting, outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    theirs = PUBLISHED_SAVING.get(setting.name)
    return (
        setting.name,
        str(setting.max_staleness),
        str(setting.consumers),
        f"{outcome.step_s:.2f}",
        f"{1 - outcome.step_s / baseline.step_s:.1%}",
        f"{theirs:.1%}" if theirs else "",
        f"{outcome.trainer_idle:.1%}",
        f"{outcome.rollout_idle:.1%}",
        outcome.slowest_stage,
        f"{outcome.ratio:.3f}",
    )


def _best_saving(mode: str, outcomes: dict[Setting, Outcome], baseline: Outcome) -> float:
    return max(1 - o.step_s / baseline.step_s for s, o in outcomes.items() if s.name == mode)


if __name__ == "__main__":
    typer.run(main)
