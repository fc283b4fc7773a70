"""What all engines share: their table, threads, texts to stop at, and noise that belongs to a request."""

import os

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.models import run_config
from tidemill.common.config.rollout import ENGINES, RolloutConfig
from tidemill.common.process.gpu_sharing import LOCKS_DIR_VARIABLE
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Engine, EngineReport, StopTexts, share_cores
from tidemill.services.rollout.engines.gpu_sharing import GpuSharingEngine
from tidemill.services.rollout.engines.random_numbers import request_key, uniforms
from tidemill.services.rollout.engines.simulated import SimulatedEngine


def test_every_row_of_the_engines_has_a_class_and_no_other_name_is_taken() -> None:
    for name in ENGINES:
        assert isinstance(build_engine(run_config("m", rollout={"engine": name})), Engine)
    with pytest.raises(ValidationError):
        RolloutConfig.model_validate({"engine": "sglang"})


def test_an_engine_that_shares_its_gpu_passes_on_how_full_it_is(tmp_path, monkeypatch) -> None:
    """Else `max_groups_in_flight: auto` would take the cache of a shared GPU for one without end."""
    monkeypatch.setenv(LOCKS_DIR_VARIABLE, str(tmp_path))
    for name in ENGINES:
        engine = build_engine(run_config("m", rollout={"engine": name}))
        shared = GpuSharingEngine(engine, turn_s=1.0, stall_s=1.0)
        assert shared.is_reporting == engine.is_reporting
        reports: list[EngineReport] = []
        shared.on_report = reports.append
        if engine.on_report is not None:
            engine.on_report(EngineReport(0.5, 2))
        assert len(reports) == engine.is_reporting


@pytest.mark.parametrize(("extra", "is_reporting"), [({}, True), ({"disable_log_stats": True}, False)])
def test_vllm_reports_unless_its_statistics_are_off(extra, is_reporting):
    engine = build_engine(run_config("m", rollout={"engine": "vllm", "vllm": {"extra": extra}}))
    assert engine.is_reporting == is_reporting


async def test_an_engine_that_shares_its_gpu_counts_how_often_its_cache_was_emptied(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCKS_DIR_VARIABLE, str(tmp_path))
    shared = GpuSharingEngine(SimulatedEngine(run_config("m")), turn_s=1.0, stall_s=1.0)
    await shared.wake()
    await shared.sleep()
    assert shared.num_sleeps == 1


@pytest.mark.parametrize(
    ("variables", "config", "expected"),
    [
        ({}, {"workers": 1}, ("PASSIVE", "8", 8)),
        ({}, {"workers": 3}, ("PASSIVE", "2", 2)),
        ({}, {"workers": 20}, ("PASSIVE", "1", 1)),
        # The environment wins over the share, the config over both.
        ({"OMP_NUM_THREADS": "3,2", "OMP_WAIT_POLICY": "ACTIVE"}, {}, ("ACTIVE", "3,2", 3)),
        ({"OMP_NUM_THREADS": "3"}, {"num_threads": 5}, ("PASSIVE", "5", 5)),
    ],
)
def test_workers_share_the_cores_less_one(variables, config, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    number = share_cores(RolloutConfig.model_validate(config))
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"], number) == expected


@pytest.mark.parametrize("num_at_once", [1, 3, 1000])
@pytest.mark.parametrize("text", ["x" * 500 + "\nObs: y", "\nObs", "é" * 300 + "\nObs" + "é" * 40])
def test_a_text_to_stop_at_is_reached_once_with_the_tokens_that_complete_it(text, num_at_once):
    ids = list(text.encode())
    stops = StopTexts(["never", "\nObs"], lambda ids: bytes(ids).decode(errors="replace"))
    ends = [*range(num_at_once, len(ids), num_at_once), len(ids)]
    reached = [end for end in ends if stops.reach(ids[:end])]
    whole = len(text[: text.index("\nObs")].encode()) + 4
    assert reached == [next(end for end in ends if end >= whole)] and stops.is_reached
    assert not StopTexts([], pytest.fail).reach(ids), "without texts nothing is decoded"


def test_noise_is_uniform_and_belongs_to_its_key() -> None:
    keys_B = np.array([request_key(0, str(i)) for i in range(20_000)], dtype=np.uint64)
    numbers_B = uniforms(keys_B, 3)
    assert ((numbers_B >= 0) & (numbers_B < 1)).all()
    assert np.histogram(numbers_B, bins=10)[0] == pytest.approx([2000] * 10, rel=0.1)
    assert uniforms(keys_B[7:8], 3)[0] == numbers_B[7]
    assert abs(np.corrcoef(numbers_B, uniforms(keys_B, 4))[0, 1]) < 0.03
    assert request_key(0, "a") != request_key(1, "a") != request_key(1, "b")
