"""Finds the shortest schedule that fails in the same way: fewer faults, plainer faults, a plainer config."""

from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.run import Verdict, run
from tests.simulation.schedule import Fault, Schedule, Setup

MOST_RUNS = 120


def shrink(verdict: Verdict) -> Verdict:
    """The smallest failing schedule that can be reached by leaving things out, one after the other."""
    best = verdict
    kind = kind_of(verdict)
    num_runs = 0
    is_smaller = True
    while is_smaller and num_runs < MOST_RUNS:
        is_smaller = False
        for candidate in _smaller(best.schedule):
            num_runs += 1
            smaller = run(candidate)
            if kind_of(smaller) == kind:
                best = smaller
                is_smaller = True
                break
            if num_runs >= MOST_RUNS:
                break
    return best


def kind_of(verdict: Verdict) -> str:
    """What sort of failure it is: the word before the colon, and of a crash its last line."""
    word, _, message = verdict.problem.partition(":")
    return f"{word}: {message.strip().splitlines()[-1][:60]}" if word == "crash" else word


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    faults = schedule.faults
    if len(faults) > 3:
        for half in (faults[: len(faults) // 2], faults[len(faults) // 2 :]):
            yield replace(schedule, faults=half)
    for fault in faults:
        yield schedule.without(fault)
    for name, value in _PLAIN.items():
        if getattr(schedule.setup, name) != value:
            yield replace(schedule, setup=replace(schedule.setup, **{name: value}))
    for index, fault in enumerate(faults):
        for plainer in _plainer(fault):
            yield replace(schedule, faults=(*faults[:index], plainer, *faults[index + 1 :]))


_PLAIN = {
    "archive": False,
    "mixed": False,
    "claims": False,
    "choices": False,
    "sample_s": 1.0,
    "evaluation": False,
    "batch_order": "in_order",
    "rollouts": 1,
    "rewards": 1,
    "groups_per_step": 1,
    "group_size": 2,
    "max_staleness": 1,
    "checkpoint_every": 2,
    "keep_checkpoints": 2,
    "steps": 3,
}
assert _PLAIN.keys() <= Setup.__dataclass_fields__.keys()


def _plainer(fault: Fault) -> Iterator[Fault]:
    for name in ("before", "clock_s", "hang", "lose", "lose_commits"):
        if name in fault.how:
            yield replace(fault, how={key: value for key, value in fault.how.items() if key != name})
    if fault.how.get("lose", 0) > 1:
        yield replace(fault, how=fault.how | {"lose": fault.how["lose"] // 2})
    if round(fault.at_s, 1) != fault.at_s:
        yield replace(fault, at_s=round(fault.at_s, 1))
