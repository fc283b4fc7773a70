"""How much of the reward's and the rollout's time the trainer hides: the experiment of verl #2854.

    python -m benchmarks.overlap                  # 1, 2, 4, 8 reward consumers: a quarter of an hour
    python -m benchmarks.overlap --consumers 1,4

Real services as processes on a real Redis; only the work itself is simulated. The original: 8 x H20, 7B,
batch 1024 x 5 in 4 mini-batches of 256, rewards that take uniform(1, 40) s for each sample, scored by at
most 256 threads; stages of 40 s (generation), 46 s (old logprobs), 37 s (reference) and 127 s (update).
Every time is divided by `--scale`. Batch, mini-batches and reward slots are divided by `--shrink` together,
so that a reward consumer here is their whole reward service: 256 / shrink slots.

| mode | off-policy | updates a step | early start |
|---|---|---|---|
| baseline | no | 4 | no: logprobs while rewards are waited for, updates after the last one |
| mini-batch | no | 4 | each update as soon as its own groups are in |
| one step | k = 1 | 4 | no |
| both | k = 1 | 4 | yes |

Unlike theirs, generation has its own GPUs, so with `one step` the trainer's stages are 210 s of their 250.
Old and reference logprobs are forward passes over one group at a time, in time that would be spent waiting.

Step time is the median over steps, without the first `--warm-up` ones, and is printed on the original's
scale. Savings are against the baseline with one consumer. `ratio` is step time over the busy time of the
slowest stage: trainer (measured), generation, or reward (samples x mean delay / slots).
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.runs import ServiceRun, simulated_config
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.programs import run_main
from tidemill.common.streams import Entry, read_range
from tidemill.common.wire.messages import Commit

GENERATION_S, LOGPROBS_S, TRAINING_S = 40.0, 46.0 + 37.0, 127.0
REWARD_S = (1.0, 40.0)
GROUPS, GROUP_SIZE, MINI_BATCHES, REWARD_SLOTS = 1024, 5, 4, 256
PUBLISHED_S = {"baseline": 583, "mini-batch": 509, "one step": 420, "both": 424}
"""The median step that verl published, in seconds, without validation."""
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
            trainer__mini_batches=MINI_BATCHES,
            trainer__algorithm={"reference": {"model": "frozen"}},  # so that every group is prepared
            trainer__simulated={
                "group_s": TRAINING_S / scale / groups,
                "prepare_s": LOGPROBS_S / scale / groups,
            },
            trainer__checkpoint_every=1000,
            rollout__simulated={
                "group_s": GENERATION_S / scale / 2,
                "jitter": 1.0,
                "tokens": 16,
                "vocab_size": 32,
            },
            rollout__max_num_seqs=groups * GROUP_SIZE,
            rollout__max_groups_in_flight=groups,
            reward__function="exact_match",
            reward__delay_s=[delay_s / scale for delay_s in REWARD_S],
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
    stages_of_trainer = ("time/prepare_s", "time/train_s", "time/update_s")
    busy = [sum(commit.metrics.get(name, 0.0) for name in stages_of_trainer) for commit in commits]
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
    shrink: Annotated[int, typer.Option(help="divide batch and reward slots by this")] = 8,
    steps: Annotated[int, typer.Option(help="steps of each run")] = 8,
    warm_up: Annotated[int, typer.Option(help="steps left out at the start")] = 2,
    consumers: Annotated[str, typer.Option(help="reward consumers, such as 1,2,4,8")] = "1,2,4,8",
) -> None:
    """Compare on-policy and one step off-policy, with and without early start."""
    if GROUPS // shrink % MINI_BATCHES or REWARD_SLOTS % shrink:
        raise typer.BadParameter(f"must divide {REWARD_SLOTS}", param_hint="--shrink")
    counts = [int(count) for count in consumers.split(",")]
    modes = (("baseline", 0, False), ("mini-batch", 0, True), ("one step", 1, False), ("both", 1, True))
    first = Setting(*modes[0], consumers=1)  # always measured: savings are relative to it
    settings = [Setting(*mode, consumers=count) for count in counts for mode in modes]
    settings = [first, *(setting for setting in settings if setting != first)]
    outcomes: dict[Setting, Outcome] = {}
    for setting in settings:
        print(f"running: {setting.name}, {setting.consumers} reward consumer(s)", flush=True)
        outcomes[setting] = run_main(measure(setting, scale, shrink, steps, warm_up))
    baseline = outcomes[first]
    rows = [_row(setting, outcomes[setting], baseline, scale) for setting in settings]
    columns = (
        "mode",
        "k",
        "consumers",
        "step s",
        "theirs",
        "saving",
        "theirs",
        "trainer idle",
        "rollout idle",
        "slowest",
        "ratio",
    )
    note = (
        f"{machine()}. Delays / {scale:g}, batch and slots / {shrink}; step times are measured x {scale:g}. "
        f"Saving is against the first row; theirs had one reward service of {REWARD_SLOTS} threads."
    )
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


def _row(setting: Setting, outcome: Outcome, baseline: Outcome, scale: float) -> tuple[str, ...]:
    is_theirs = setting.consumers == 1
    saving = PUBLISHED_SAVING.get(setting.name) if is_theirs else None
    return (
        setting.name,
        str(setting.max_staleness),
        str(setting.consumers),
        f"{outcome.step_s * scale:.0f}",
        str(PUBLISHED_S[setting.name]) if is_theirs else "",
        f"{1 - outcome.step_s / baseline.step_s:.1%}",
        f"{saving:.1%}" if saving else "",
        f"{outcome.trainer_idle:.1%}",
        f"{outcome.rollout_idle:.1%}",
        outcome.slowest_stage,
        f"{outcome.ratio:.3f}",
    )


def _best_saving(mode: str, outcomes: dict[Setting, Outcome], baseline: Outcome) -> float:
    return max(1 - o.step_s / baseline.step_s for s, o in outcomes.items() if s.name == mode)


if __name__ == "__main__":
    typer.run(main)
