"""Published figures of others, and what a run that is played in virtual time makes of their parameters.

Simulated are lengths, speeds and the order of events (`scale_pipeline`).
What they publish of the trainer (its time for an update) is taken as it is; what a step takes, and what the
trainer waits, is predicted.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from statistics import mean

from benchmarks.report import print_table
from benchmarks.scale_pipeline import Flow, Pipeline, mean_of_later, mean_of_lengths, play

VERL = {
    0.0: (231.34, 128.47, 98.77),
    0.1: (171.30, 58.17, 109.12),
    0.3: (146.11, 38.88, 103.22),
    0.5: (150.63, 33.14, 113.16),
}
"""verl, docs/advance/fully_async.md: 7B, 64 + 64 GPUs. By staleness threshold: step, wait, update (s)."""
FITTED = (0.0, 0.3)
"""Thresholds on which the next two numbers were fitted; the other rows are predictions."""
GROUPS_PER_S, CAPPED_ALONE_S = 4.5, 120.0
"""Of the saturated engines, and what a completion of full length takes by itself."""
UPDATE_S, REST_S, SIGMA, CUT = 106.0, 4.0, 1.0, 16.0
"""Lengths of a row are to others as the work of its update is to this one: the policies had learnt others."""
SMALLER, SMALLER_UPDATE_S = 189.26, 156.98
"""The same on 32 + 32 GPUs, at a threshold of 0.5."""
TRAINER_BOUND = (282.75, 22.06, 256.68)
"""verl, 30B-A3B on 96 + 32 GPUs: step, wait, reference and update."""
HEAD_ROOM, SHORT_ALONE_S = 1.3, 40.0
"""Assumed of it: what rollout can do over what the trainer can, and the time of 8k tokens by themselves."""
ONE_STEP = {"FSDP2": (520.0, 45.0, 458.0, 445.0), "Megatron": (566.0, 59.0, 501.0, 467.0)}
"""verl, docs/advance/one_step_off.md: step, wait, generation, old logprobs and update."""
STALENESS = ((120, 240, 0.63, 1.26), (240, 120, 0.92, 3.59), (210, 120, 0.86, 3.40), (108, 120, 0.67, 1.92))
"""Applied Compute: completions under way, in a batch, speed of rollout over that of the trainer, and the mean
staleness that they measured. In two rows not all places were full: those that were are given."""
ARMS, ARM_SIGMA = 8, 0.25
"""Longest of a group over the mean is 1.42 with these, as theirs."""


@dataclass(frozen=True)
class Row:
    """One figure, theirs and ours."""

    anchor: str
    what: str
    theirs: float
    ours: float
    is_gated: bool = True
    """Whether its error counts; what was fitted on does not."""

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.ours / self.theirs - 1.0)


def verl(threshold: float, update_s: float, share: float = 1.0) -> Flow:
    """Their run at a threshold, on a `share` of the GPUs."""
    factor = update_s * share / UPDATE_S
    alone_s = CAPPED_ALONE_S * mean_of_lengths(SIGMA, CUT) / CUT * factor
    held = int(4096 * share)
    return play(
        Pipeline(512, 16, threshold, held, share * GROUPS_PER_S * 16 / factor, alone_s, update_s, SIGMA, CUT,
                 fetches=4, rest_s=REST_S, steps=6)
    )  # fmt: skip


def ablation() -> Iterator[Row]:
    """verl's thresholds, and half of the GPUs."""
    for threshold, (step_s, wait_s, update_s) in VERL.items():
        flow = verl(threshold, update_s)
        is_gated = threshold not in FITTED
        yield Row("verl_thresholds", f"threshold {threshold:g}: step s", step_s, flow.step_s, is_gated)
        yield Row("verl_waits", f"threshold {threshold:g}: wait s", wait_s, flow.wait_s, False)
    half = verl(0.5, SMALLER_UPDATE_S, 0.5)
    yield Row("verl_half", "32 + 32 GPUs: step s", SMALLER, half.step_s, False)


def trainer_bound() -> Iterator[Row]:
    """Rollout can do 1.3 times what the trainer can; 8k tokens cut the tail."""
    step_s, _, work_s = TRAINER_BOUND
    rate, alone_s = HEAD_ROOM * 8192 / work_s, SHORT_ALONE_S * mean_of_lengths(0.6, 8.0) / 8.0
    flow = play(
        Pipeline(512, 16, 0.5, 6144, rate, alone_s, work_s, 0.6, 8.0, fetches=4, rest_s=REST_S, steps=4)
    )
    yield Row("verl_30b", "30B, trainer-bound: step s", step_s, flow.step_s)
    yield Row("verl_30b", "30B: step over work", step_s / work_s, flow.step_s / work_s)


def one_step_off() -> Iterator[Row]:
    """How much generation differs from step to step is fitted on one run, and predicts the other."""
    step_s, wait_s, generation_s, work_s = ONE_STEP["FSDP2"]
    share = next(
        n / 1000 for n in range(1, 1000) if mean_of_later(generation_s, n / 1000, work_s) - work_s >= wait_s
    )
    for name, (step_s, wait_s, generation_s, work_s) in ONE_STEP.items():
        ours = mean_of_later(generation_s, share, work_s)
        yield Row(
            "verl_one_step", f"one step off, {name}: work and wait s", work_s + wait_s, ours, name != "FSDP2"
        )
        rest_s = step_s - work_s - wait_s
        yield Row("verl_one_step", f"one step off, {name}: step s", step_s, ours + rest_s, name != "FSDP2")


def staleness() -> Iterator[Row]:
    """Trainers that wait for rollout, with a bound that never binds."""
    for under_way, batch, speed, measured in STALENESS:
        flow = play(
            Pipeline(batch // ARMS, ARMS, 1000.0, under_way, float(under_way), 1.0, speed * batch / under_way,
                     ARM_SIGMA, by_group=False, steps=120, warm_up=20)
        )  # fmt: skip
        what = f"staleness, C {under_way}, B {batch}, rho {speed:g}"
        yield Row("staleness", what, measured, flow.staleness, False)
        longest = _longest_of(ARMS, ARM_SIGMA)
        yield Row("staleness", f"{what}, formula", under_way * longest / batch + speed, flow.staleness)


def tail() -> Iterator[Row]:
    """Laminar's lengths: what the figures of a log-normal with sigma 0.99 say, and what is drawn."""
    chance, sigma = random.Random(1), 0.99
    drawn = sorted(min(exp(sigma * chance.gauss(0.0, 1.0)), CUT) for _ in range(8 * 8192))
    yield Row(
        "long_tail",
        "99th percentile over median",
        10.0,
        drawn[int(0.99 * len(drawn))] / drawn[len(drawn) // 2],
    )
    yield Row("long_tail", "longest of 8,192 over mean", 9.9, CUT / mean(drawn))
    yield Row(
        "long_tail", "tokens in the longest 5%", 0.25, sum(drawn[int(0.95 * len(drawn)) :]) / sum(drawn)
    )
    pipeline = Pipeline(512, 16, 0.0, 8192, 8192.0, 1.0, 1e-6, sigma, CUT, steps=2)
    yield Row("long_tail", "k = 0, engines without limit: step over mean", 9.9, play(pipeline).step_s)


def _longest_of(count: int, sigma: float) -> float:
    """E[longest of `count`] over E[length]."""
    chance, top = random.Random(2), 0.0
    for _ in range(4000):
        top += max(exp(sigma * chance.gauss(0.0, 1.0)) for _ in range(count)) / 4000
    return top / mean_of_lengths(sigma, CUT)


def anchor_rows() -> list[Row]:
    """All of them."""
    return [*ablation(), *trainer_bound(), *one_step_off(), *staleness(), *tail()]


def errors_of(rows: list[Row]) -> dict[str, float]:
    """The greatest error of each anchor, of what was predicted."""
    names = dict.fromkeys(row.anchor for row in rows if row.is_gated)
    return {name: max(row.error for row in rows if row.anchor == name and row.is_gated) for name in names}


def print_anchors() -> dict[str, float]:
    """The table; returns the errors."""
    rows = anchor_rows()
    table = [
        (
            row.what,
            f"{row.theirs:,.2f}",
            f"{row.ours:,.2f}",
            f"{row.ours / row.theirs:.3f}",
            "yes" if row.is_gated else "",
        )
        for row in rows
    ]
    print_table("Published, and predicted", ("figure", "theirs", "ours", "ratio", "counts"), table)
    return errors_of(rows)
