"""How much of the reward's and the rollout's time the trainer hides: the experiment of verl #2854.

    python -m benchmarks.overlap                  # 1, 2, 4, 8 reward consumers: a quarter of an hour
    python -m benchmarks.overlap --consumers 1,4

Real services as processes on a real Redis; only the work itself is simulated. The original: 8 x H20, 7B,
batch 1024 x 5 in 4 mini-batches of 256, rewards that take uniform(1, 40) s for each sample, scored by at
most 256 threads; stages of 40 s (generation), 46 s (old logprobs), 37 s (reference) and 127 s (update).
Every time is divided by 40. Batch, mini-batches and reward slots are divided by `--shrink` together, so that
a reward consumer here is their whole reward service: 256 / shrink slots.

| mode | off-policy | updates a step | early start |
|---|---|---|---|
| baseline | no | 4 | no: logprobs while rewards are waited for, updates after the last one |
| mini-batch | no | 4 | each update as soon as its own groups are in |
| one step | k = 1 | 4 | no |
| both | k = 1 | 4 | yes |

Unlike theirs, generation has its own GPUs, so with `one step` the trainer's stages are 210 s of their 250.
Old and reference logprobs are forward passes over one group at a time, in time that would be spent waiting.

Step time is the median over steps, without the first two, and is printed on the original's scale. Savings
are against the baseline with one consumer. `ratio` is step time over the busy time of the slowest stage:
trainer (measured), generation, or reward (samples x mean delay / slots).
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import messages
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Commit

GENERATION_S = 40.0
LOGPROBS_S = 46.0 + 37.0
TRAINING_S = 127.0
REWARD_S = (1.0, 40.0)
GROUPS = 1024
GROUP_SIZE = 5
MINI_BATCHES = 4
REWARD_SLOTS = 256
SCALE = 40.0
WARM_UP = 2
MODES = {"baseline": (0, False), "mini-batch": (0, True), "one step": (1, False), "both": (1, True)}
"""Staleness bound, and early start."""
PUBLISHED_S = {"baseline": 583, "mini-batch": 509, "one step": 420, "both": 424}
"""The median step that verl published, in seconds, without validation."""
PUBLISHED_SAVING = {"mini-batch": "12.3%", "one step": "25.2%", "both": "30.9%"}


@dataclass(frozen=True)
class Outcome:
    """What one row measured; times in seconds, shares of the wall time after warm-up."""

    step_s: float
    trainer_idle: float
    slowest_stage: str
    ratio: float


async def measure(mode: str, consumers: int, shrink: int, steps: int) -> Outcome:
    """Run one setting to its end."""
    print(f"running: {mode}, {consumers} reward consumer(s)", flush=True)
    groups = GROUPS // shrink
    slots = REWARD_SLOTS // shrink
    with tempfile.TemporaryDirectory() as folder:
        config = simulated_config(
            Path(folder),
            trainer__steps=steps,
            trainer__groups_per_step=groups,
            trainer__group_size=GROUP_SIZE,
            trainer__max_staleness=MODES[mode][0],
            trainer__start_early=MODES[mode][1],
            trainer__micro_batch_tokens=max(64, groups * GROUP_SIZE * 20 // 32),
            trainer__mini_batches=MINI_BATCHES,
            trainer__algorithm={"reference": {"model": "frozen"}},  # so that every group is prepared
            trainer__simulated={
                "group_s": TRAINING_S / SCALE / groups,
                "prepare_s": LOGPROBS_S / SCALE / groups,
            },
            trainer__checkpoint_every=1000,
            rollout__simulated={
                "group_s": GENERATION_S / SCALE / 2,
                "jitter": 1.0,
                "tokens": 16,
                "vocab_size": 32,
            },
            rollout__max_num_seqs=groups * GROUP_SIZE,
            rollout__max_groups_in_flight=groups,
            reward__function="exact_match",
            reward__delay_s=[delay_s / SCALE for delay_s in REWARD_S],
            reward__max_in_flight=slots,
            streams__lease_s=60.0,
        )
        async with ServiceRun(Path(folder), config) as run:
            for role in ("trainer", "rollout"):
                run.start(role)
            for number in range(consumers):
                run.start("reward", f"reward-{number}")
            if await run.wait("trainer", 900) != 0:
                raise RuntimeError(f"the trainer failed:\n{run.log_of('trainer')[-2000:]}")
            commits = (await messages(run.broker, run.keys.commits, Commit))[WARM_UP:]
    total_s = sum(commit.metrics["step_time_s"] for commit in commits)
    waited_s = sum(
        v for commit in commits for name, v in commit.metrics.items() if name.startswith("time/wait_")
    )
    stages_of_trainer = ("time/prepare_s", "time/train_s", "time/update_s")
    busy = []
    for commit in commits:
        busy.append(sum(commit.metrics.get(name, 0.0) for name in stages_of_trainer))
    stages = {
        "trainer": statistics.median(busy),
        "rollout": GENERATION_S / SCALE,
        "reward": groups * GROUP_SIZE * sum(REWARD_S) / 2 / SCALE / (consumers * slots),
    }
    slowest = max(stages, key=stages.__getitem__)
    step_s = statistics.median(c.metrics["step_time_s"] for c in commits)
    return Outcome(step_s, waited_s / total_s, slowest, step_s / stages[slowest])


def main(consumers: str = "1,2,4,8", steps: int = 8, shrink: int = 8) -> None:
    """Compare on-policy and one step off-policy, with and without early start."""
    settings = [(mode, int(count)) for count in consumers.split(",") for mode in MODES]
    first = ("baseline", 1)  # always measured: savings are relative to it
    outcomes = {
        setting: run_main(measure(*setting, shrink, steps)) for setting in dict.fromkeys([first, *settings])
    }
    baseline = outcomes[first]
    savings = {setting: 1 - outcome.step_s / baseline.step_s for setting, outcome in outcomes.items()}
    rows = [
        (
            mode,
            MODES[mode][0],
            count,
            f"{outcome.step_s * SCALE:.0f}",
            PUBLISHED_S[mode] if count == 1 else "",
            f"{savings[mode, count]:.1%}",
            PUBLISHED_SAVING.get(mode, "") if count == 1 else "",
            f"{outcome.trainer_idle:.1%}",
            outcome.slowest_stage,
            f"{outcome.ratio:.3f}",
        )
        for (mode, count), outcome in outcomes.items()
    ]
    columns = "mode,k,consumers,step s,theirs,saving,theirs,trainer idle,slowest,ratio"
    note = (
        f"{machine()}. Delays / {SCALE:g}, batch and slots / {shrink}; step times are measured x {SCALE:g}. "
    )
    note += f"Saving is against the first row; theirs had one reward service of {REWARD_SLOTS} threads."
    print_table("Overlap: the experiment of verl #2854", columns, rows, note)
    best = min((o for (mode, _), o in outcomes.items() if mode == "both"), key=lambda outcome: outcome.step_s)
    result = {}
    for mode, name in (("mini-batch", "minibatch"), ("one step", "one_step"), ("both", "both")):
        savings_of_mode = [saving for (measured_mode, _), saving in savings.items() if measured_mode == mode]
        result[f"saving_{name}"] = round(max(savings_of_mode), 4)
    result |= {
        "trainer_idle_share": round(best.trainer_idle, 4),
        "step_s_k0": round(baseline.step_s, 3),
        "step_s_k1": round(best.step_s, 3),
        "ratio_to_slowest_stage": round(best.ratio, 4),
    }
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
