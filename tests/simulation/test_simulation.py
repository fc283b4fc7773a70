"""The simulation itself: it repeats itself exactly, and it notices when a mechanism is taken out."""

import json
import os
import subprocess
import sys

import pytest

import tidemill.common.redis.broker
from tests.simulation.generate import schedule_of
from tests.simulation.memory_redis import TRUSTED
from tests.simulation.run import run
from tests.simulation.schedule import Fault, Schedule, Setup
from tests.simulation.shrink import shrink
from tests.support.preloaded import REPO
from tests.support.waiting import PATIENCE_S

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


def test_a_seed_gives_the_same_commands_at_the_same_times() -> None:
    for seed in (3, 5, 8):
        assert run(schedule_of(seed)).digest == run(schedule_of(seed)).digest
    assert run(schedule_of(3)).digest != run(schedule_of(4)).digest


def test_another_process_with_other_hashes_gives_them_too() -> None:
    command = [sys.executable, "-c", DIGEST_OF.format(3)]
    found = subprocess.run(
        command, cwd=REPO, env=os.environ | {"PYTHONHASHSEED": "5"}, capture_output=True, text=True
    )
    assert found.stdout.strip() == run(schedule_of(3)).digest, found.stderr


def test_a_sleeper_does_no_harm() -> None:
    verdict = run(SLEEPER)
    assert (verdict.problem, verdict.faults["freeze"]) == ("", 1)


def without(monkeypatch: pytest.MonkeyPatch, script: str, part: str) -> None:
    """Take a part out of a Lua script."""
    known = tidemill.common.redis.broker._script

    def changed(name: str) -> tuple[str, str]:
        import hashlib

        source, sha = known(name)
        if name != script:
            return source, sha
        assert part in source
        source = source.replace(part, "")
        return source, hashlib.sha1(source.encode()).hexdigest()

    monkeypatch.setattr(tidemill.common.redis.broker, "_script", changed)


def test_a_failing_schedule_is_shrunk_to_the_fault_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "publish_sample", "redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])")
    faults = (
        Fault(1.0, "slow", "", {"for_s": 1.0, "slow_s": 0.1}),
        Fault(2.0, "host_clock", "trainer", {"by_s": 5.0}),
    )
    verdict = run(Schedule(1, Setup(rollouts=2, steps=24), faults))
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
