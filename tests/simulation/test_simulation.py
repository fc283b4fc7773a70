"""The simulation itself: it repeats itself exactly, and it notices when a mechanism is taken out."""

import gc
import json
import os
import random
import subprocess
import sys
import threading
from itertools import compress
from typing import Any

import pytest

import tidemill.common.redis.broker
from tests.simulation import cluster, faults, script_check, watch
from tests.simulation.crafted import crafted
from tests.simulation.generate import schedule_of
from tests.simulation.memory_redis import TRUSTED
from tests.simulation.run import run
from tests.simulation.schedule import Fault, Schedule, Setup
from tests.simulation.shrink import shrink
from tests.support.preloaded import REPO
from tests.support.waiting import PATIENCE_S
from tidemill.common.errors import LeaseLostError
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.rollout.weight_follower import WeightFollower

DIGEST_OF = """
from tests.simulation.generate import schedule_of
from tests.simulation.run import run
print(run(schedule_of({})).digest)
"""
SLEEPER = Schedule(
    5,
    Setup(rollouts=2, group_size=3, groups_per_step=2),
    (Fault(1.0, "freeze", "rollout-0", {"for_s": 9.0}),),
)
"""A worker is frozen for two leases while it holds tickets, then goes on and tries to publish."""
NUM_CRAFTED = 12
"""Schedules of one kind, of which several come to its moment."""
GUARDS = {
    ("beginning", "start_group"): "  return 0\n",
    ("leaving", "hand_back"): ", ARGV[2]",
    ("put_back", "requeue"): "'RETRYCOUNT', 0, ",
}
"""By kind of schedule and script: its part that matters at the moment of that kind."""


def test_a_seed_gives_the_same_commands_at_the_same_times() -> None:
    for seed in (3, 5, 8):
        assert run(schedule_of(seed)).digest == run(schedule_of(seed)).digest
    assert run(schedule_of(3)).digest != run(schedule_of(4)).digest


def test_another_process_with_other_hashes_gives_them_too() -> None:
    command = [sys.executable, "-c", DIGEST_OF.format(3)]
    process = subprocess.run(
        command, cwd=REPO, env=os.environ | {"PYTHONHASHSEED": "5"}, capture_output=True, text=True
    )
    assert process.stdout.strip() == run(schedule_of(3)).digest, process.stderr


def test_a_run_leaves_no_thread_behind() -> None:
    """Nor, with it, the memory of its processes: thousands of schedules run in one process."""
    run(schedule_of(0))
    gc.collect()
    before = threading.active_count()
    run(schedule_of(1))
    gc.collect()
    assert threading.active_count() <= before


def test_a_sleeper_does_no_harm() -> None:
    verdict = run(SLEEPER)
    assert (verdict.problem, verdict.faults["freeze"]) == ("", 1)


def without(monkeypatch: pytest.MonkeyPatch, script: str, text: str) -> None:
    """Take a part out of a Lua script."""
    load_script = tidemill.common.redis.broker._script

    def changed(name: str) -> tuple[str, str]:
        import hashlib

        source, sha = load_script(name)
        if name != script:
            return source, sha
        assert text in source
        source = source.replace(text, "")
        return source, hashlib.sha1(source.encode()).hexdigest()

    for module in (tidemill.common.redis.broker, cluster, faults, script_check, watch):
        monkeypatch.setattr(module, "_script", changed)


def problems_of(kind: str) -> list[str]:
    """What is wrong with the first bad schedule of this kind; empty where all are good."""
    for seed in range(NUM_CRAFTED):
        setup, moments = crafted(kind, random.Random(seed), Setup())
        verdict = run(Schedule(seed, setup, tuple(moments)))
        if verdict.problem:
            return verdict.violations
    return []


@pytest.mark.parametrize(("kind", "script"), GUARDS)
def test_a_script_that_checks_too_little_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, script: str
) -> None:
    without(monkeypatch, script, GUARDS[kind, script])
    expected = "requeue" if script == "requeue" else "lease"
    assert any(problem.startswith(f"{expected}: ") for problem in problems_of(kind))


def test_other_weights_of_a_held_version_that_are_not_loaded_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_to_load = WeightFollower._is_to_load

    def is_newer(follower: WeightFollower, manifest: WeightManifest) -> bool:
        return manifest.version != follower.engine.version and is_to_load(follower, manifest)

    monkeypatch.setattr(WeightFollower, "_is_to_load", is_newer)
    assert any(problem.startswith("weights: ") for problem in problems_of("other_weights"))


def test_payloads_that_shift_against_their_deliveries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Consumer._complete

    async def shifted(consumer: Consumer[Any], results: Any, out_key: str) -> list[bool]:
        deliveries = [delivery for delivery, _ in results]
        try:
            consumer._check_current(deliveries)
        except LeaseLostError:
            current = [consumer._is_current(delivery) for delivery in deliveries]
            payloads = [payload for _, payload in results]
            kept = list(zip(compress(deliveries, current), payloads, strict=False))
            done = iter(await complete(consumer, kept, out_key))
            return [is_current and next(done) for is_current in current]
        return await complete(consumer, results, out_key)

    monkeypatch.setattr(Consumer, "_complete", shifted)
    assert any(problem.startswith("pair: ") for problem in problems_of("shift"))


def test_a_failing_schedule_is_shrunk_to_the_fault_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "publish_sample", "redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])")
    harmless = (
        Fault(1.0, "slow", "", {"for_s": 1.0, "slow_s": 0.1}),
        Fault(2.0, "host_clock", "trainer", {"by_s": 5.0}),
    )
    verdict = run(Schedule(2, Setup(rollouts=2, steps=12), harmless))
    assert verdict.problem
    shrunk = shrink(verdict)
    assert shrunk.problem and not shrunk.schedule.faults


def test_the_files_of_tests_that_trust_the_redis_in_memory_are_there() -> None:
    assert {path.stem for path in (REPO / "tests" / "contract").rglob("test_*.py")} >= TRUSTED


def test_the_command_ends_with_one_line_of_json_and_says_by_its_code_whether_all_went_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--schedules", "2", "--seed", "3", "--jobs", "1"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["schedules"], summary["violations"], summary["stalls"]) == (2, 0, 0)
    assert sum(summary["faults"].values()) > 0
