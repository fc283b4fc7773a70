"""A timeline keeps the rules of its format, whatever the clocks of a run's machines say."""

import random
from typing import Any

import pytest

from tests.support.histories import BEGIN, commits, manifests, scores, tickets, trajectories
from tests.support.traces import problems_of, slices_of
from tidemill.services.console.look.joins import SampleFacts
from tidemill.services.console.look.timeline import Stretch, Trace, build


def small_stretch() -> Stretch:
    issued = {ticket.ticket: ticket.issued_at for ticket in tickets()}
    stretch = Stretch(commits(), manifests=manifests())
    for trajectory, score in zip(trajectories(), scores(), strict=True):
        stretch.samples[trajectory.key] = SampleFacts(
            trajectory.key, 4, 3, (0, 0), trajectory.worker, trajectory.started_at, trajectory.finished_at,
            issued[trajectory.ticket], score.worker, score.scored_at, score.latency_s, score.attempts,
            score.tries, score.value,
        )  # fmt: skip
    return stretch


def test_samples_steps_and_versions_are_drawn_and_followed() -> None:
    events = list(build(small_stretch()).events())
    assert problems_of(events) == []
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}

    def way_of(sample: str) -> list[str]:
        return [names[e["pid"]] for e in events if e["ph"] in "stf" and e["name"] == sample]

    def drawn(process: str) -> dict[str, Any]:
        slices = [e for e in events if e["ph"] == "X" and names[e["pid"]] == process]
        return {e["name"]: (e["ts"], e["dur"]) for e in slices}

    assert way_of("4.1") == [
        "queue: tickets", "rollout rollout-0", "queue: to be scored", "reward reward-0",
        "queue: to be trained", "trainer", "trainer",
    ]  # fmt: skip
    for sample in ("1.1", "2.0"):
        assert way_of(sample)[-1] == "reward reward-0", "what was not trained ends with its reward"
    assert drawn("rollout rollout-0")["4.1"] == (14_000_000, 3_000_000), "microseconds after the beginning"
    trainer = drawn("trainer")
    assert trainer["step 1"] == (10_000_000, 9_500_000)
    assert trainer["waits for the first group"][1] == 4_500_000
    assert trainer["writes the weights"][1] == 1_000_000
    moments = {e["name"] for e in events if e["ph"] == "i"}
    assert {"ticket 2 dropped: zero_variance", "version 2 announced"} <= moments


@pytest.mark.parametrize("seed", range(20))
def test_clocks_that_differ_make_no_trace_that_breaks_the_rules(seed: int) -> None:
    chance = random.Random(seed)
    stretch = small_stretch()
    for key in list(stretch.samples):
        times = [chance.choice([0.0, BEGIN + chance.uniform(-5, 30)]) for _ in range(4)]
        stretch.samples[key] = SampleFacts(
            key, 4, 3, (0, 1), "w", times[0], times[1], times[2], "s", times[3], chance.uniform(0, 40), 2,
            (("judge", chance.uniform(0, 9), 0.0, "no"), ("judge", 1.0, chance.uniform(0, 9), "")),
            chance.choice([None, float("nan")]),
        )  # fmt: skip
    assert problems_of(build(stretch).events()) == []


def count_at(moment: int, spans: list[tuple[int, int]]) -> int:
    """How many spans hold a moment."""
    return sum(begin <= moment < end for begin, end in spans)


@pytest.mark.parametrize("seed", range(20))
def test_slices_that_overlap_lie_in_as_few_lanes_as_can_be(seed: int) -> None:
    chance = random.Random(seed)
    trace = Trace(0.0)
    spans = []
    for _ in range(200):
        begin = chance.randrange(1000)
        end = begin + chance.choice([0, 1, 10, 300])
        spans.append((begin, end))
        trace.slice(("p", "t"), "slice", begin / 1e6, end / 1e6)
    events = list(trace.events())
    assert problems_of(events) == []
    most = max(count_at(moment, spans) for moment in range(1300))
    assert len(slices_of(events)) <= max(most, 1) + 1, "slices that take no time may need one more"
