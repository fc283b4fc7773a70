"""Keys carry the run's hash tag, are distinct, and are spelled in one place."""

import re

import pytest

from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import ROLES
from tidemill.common.process.programs import ROOT
from tidemill.common.wire.keys import PREFIX, RUNS, Keys
from tidemill.common.wire.messages import Lane


def all_keys(keys: Keys) -> list[str]:
    laned = [make(lane) for make in (keys.prompts, keys.trajectories, keys.scores) for lane in Lane]
    groups = [keys.progress(ticket, lane) for ticket in (0, 1) for lane in Lane]
    public = [name for name in vars(Keys) if name[0] != "_"]  # some Pythons list `__weakref__`, others do not
    values = [getattr(keys, name) for name in public]
    plain = [value for value in values if isinstance(value, str)]
    beats = [keys.workers(role) for role in ROLES]
    others = (keys.run_id, keys.sandbox_queue, keys.sandbox_names)
    return laned + groups + beats + [key for key in plain if key not in others]


def test_queues_and_names_of_jobs_are_apart_by_run_and_such_as_rq_accepts():
    runs = [Keys(run_id) for run_id in ("a", "b", "a.b")]
    assert len({keys.sandbox_names for keys in runs}) == 3
    assert all(keys.sandbox_queue.startswith(f"tidemill:{keys.run_id}:") for keys in runs)
    assert all(re.fullmatch(r"sandbox-[0-9a-f]{16}-", keys.sandbox_names) for keys in runs)


def test_every_key_carries_the_hash_tag_of_its_run_and_no_two_are_the_same():
    keys = [key for run_id in ("a", "b", "a.b") for key in all_keys(Keys(run_id))]
    assert all(key.startswith("tidemill:{run-1}:") for key in all_keys(Keys("run-1")))
    assert len(keys) >= 3 * 16
    assert len(set(keys)) == len(keys) and RUNS not in keys


def test_the_lane_of_evaluation_is_a_suffix_and_a_key_is_named_without_its_prefix():
    assert Keys("r").prompts() == "tidemill:{r}:prompts"
    assert Keys("r").prompts(Lane.EVAL) == "tidemill:{r}:prompts:eval"
    assert Keys("r").name_of(Keys("r").scores(Lane.EVAL)) == "scores:eval"


def test_run_ids_that_could_leave_their_place_are_refused():
    for run_id in ("a", "7", "gsm8k_2026-10-01.3", "A" * 100):
        assert Keys(run_id).run_id == run_id
    for run_id in ("", "-a", ".", "a b", "a:b", "a}b", "{a}", "ä", "a/b", "../a", "a" * 101, "a\n"):
        with pytest.raises(ConfigError, match="run id"):
            Keys(run_id)


def test_key_names_are_spelled_in_one_place_only():
    spelled = re.compile(rf"{PREFIX}:[{{<a-z*%]")
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("common", "services", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".lua") and path != ROOT / "common" / "wire" / "keys.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if spelled.search(line)
    ]
    assert offenders == []
