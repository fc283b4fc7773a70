"""What the benchmark of recovery plans and counts."""

from types import SimpleNamespace
from typing import Any

from benchmarks.recovery import PARTS, HeldSamples, plan, rows
from tests.chaos.faults import Kind
from tests.chaos.recovery import Event


def test_each_part_dies_once_in_each_round_and_before_the_end() -> None:
    faults = plan(steps=60, rounds=2)
    assert [fault.kind for fault in faults] == [*PARTS] * 2
    versions = [fault.at_version for fault in faults]
    assert versions == sorted(versions) and versions[-1] < 57


def test_held_is_what_the_victim_had_just_before_and_of_a_node_what_all_had() -> None:
    held: Any = HeldSamples(group_size=4)
    held._seen += [(1.0, {"rollout-0": 8}), (2.0, {"rollout-0": 4, "reward-1": 3}), (3.0, {})]
    worker = Event(Kind.ROLLOUT, "rollout-0", 2.5, 1, died_at=2.5, recovered_s=4.0)
    node = Event(Kind.POWER, "trainer", 2.9, 1, died_at=2.9, recovered_s=9.0, is_overtaken=True)
    found = {row["part"]: SimpleNamespace(**row) for row in rows([worker, node], held)}
    assert (found["rollout worker"].held_samples, found["rollout worker"].useful_again_s) == (4, 4.0)
    assert (found["node"].held_samples, found["node"].useful_again_s) == (7, None)
    assert found["trainer"].deaths == 0
