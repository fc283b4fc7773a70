"""What people see of a run, from snapshots made by hand."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.redis.broker import MemoryUse
from tidemill.services.console.launch.views import PlainView
from tidemill.services.console.processes.supervisor import ServiceStatus
from tidemill.services.console.status.dashboard import dashboard, evaluation_line, sparkline, step_line
from tidemill.services.console.status.report import spell_lines
from tidemill.services.console.status.snapshot import QueueDepth, RunSnapshot, StepPoint
from tidemill.services.console.text.formats import duration


def snapshot(num_steps: int = 3, **fields: Any) -> RunSnapshot:
    metrics = {"staleness/max": 1.0, "staleness/mean": 0.5, "completion_tokens": 300.0, "step_time_s": 2.0}
    points = [StepPoint(step, {"reward": step / 10, **metrics}, 0.0) for step in range(num_steps)]
    return RunSnapshot("run-1", steps=10, max_staleness=1, points=points, **fields)


def shown(picture: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(picture)
    return console.file.getvalue()  # type: ignore[attr-defined]


def beat(name: str, role: str, state: str, pid: int = 7, age_s: float = 0.0) -> Heartbeat:
    return Heartbeat(name, role, state=state, idle_share=0.25, version=3, pid=pid, at=time.time() - age_s)


def test_rates_leave_out_the_first_step() -> None:
    run = snapshot()
    run.points[0].metrics["step_time_s"] = 100.0
    assert (run.version, run.step_s, run.eta_s, run.tokens_per_s) == (3, 2.0, 14.0, 150.0)


def test_a_full_redis_is_named_and_not_taken_for_silent_processes() -> None:
    run = snapshot(workers=[beat("reward-1", "reward", "score", age_s=60.0)], memory=MemoryUse(1000, 1000))
    text = shown(dashboard(run), width=200)
    assert "Redis is full" in text and "silent" not in text
    assert run.as_dict()["redis"] == {
        "used_bytes": 1000, "max_bytes": 1000, "policy": "noeviction", "is_full": True
    }  # fmt: skip
    assert "silent" in shown(dashboard(snapshot(workers=run.workers, memory=MemoryUse(900, 1000))), width=200)


def test_code_that_blocks_an_event_loop_is_a_warning_with_its_line() -> None:
    blocked = beat("reward-1", "reward", "score")
    blocked.counts, blocked.detail = (
        {"blocking": 1},
        "score blocks its event loop, up to 3.0 s: score (my.py, line 4)",
    )
    text = shown(dashboard(snapshot(workers=[blocked, beat("reward-2", "reward", "score")])), width=200)
    assert "warning  reward-1: score blocks its event loop" in text and "my.py, line 4" in text
    assert "warning  reward-2" not in text


def test_what_a_version_of_the_weights_and_a_checkpoint_cost_is_shown() -> None:
    writer, *engines = (
        beat(name, role, "train") for name, role in (("t", "trainer"), ("a", "rollout"), ("b", "rollout"))
    )
    writer.counts = {"weights_bytes": 2_500_000.0, "weights_changed": 0.014, "weights_encode_s": 0.3}
    writer.counts |= {"checkpoint_copy_s": 0.25, "checkpoint_wait_s": 3.0, "checkpoint_write_s": 12.0}
    for engine, pause_s in zip(engines, (0.01, 0.02), strict=True):
        engine.counts = {"weights_load_s": 0.5, "weights_pause_s": pause_s}
    text = " ".join(shown(dashboard(snapshot(workers=[writer, *engines])), width=160).split())
    for words in ("copied in 250 ms", "wait of 3.0 s", "written beside in 12.0 s"):
        assert words in text
    for words in ("written 2.5 MB, 1.4% changed", "beside training 300 ms", "in 500 ms", "pause 20 ms"):
        assert words in text
    writer.counts["weights_changed"] = -1.0
    assert "changed" not in shown(dashboard(snapshot(workers=[writer])), width=160)


def test_failures_are_seen_and_never_shown_as_numbers() -> None:
    evaluations = [{"version": 0, "set": "held", "score": float("nan"), "num_failed": 12}]
    run = snapshot(state={"evaluations": evaluations})
    run.points[0].metrics["groups_dropped"] = 2.0
    run.points[-1].metrics.update({"scores/failed_ratio": 0.25, "groups_dropped": 1.0})
    text = shown(dashboard(run))
    assert "all failed (12 samples)" in text and "nan" not in text
    assert "25.0% of the last step" in text
    assert "3 groups, 1 in the last step" in text
    assert "25% of the scores failed" in step_line(run) and "1 groups replaced" in step_line(run)
    assert evaluation_line(evaluations[0]).endswith("on held: all failed (12 samples)")
    assert evaluation_line({"version": 1, "set": "a", "score": 0.5, "num_failed": 2}).endswith(
        "0.500 (2 failed)"
    )


def test_the_dashboard_fits_80_columns_and_says_where_things_stand() -> None:
    evaluations = [
        {"version": 0, "set": "held", "score": 0.31},
        {"version": 2, "set": "held", "score": 0.72},
        {"version": 3, "set": "held", "score": 0.65},
    ]
    run = snapshot(
        state={"status": "running", "evaluations": evaluations},
        queues=[QueueDepth("prompts", 9, 5, 4), QueueDepth("trajectories", 40, None, 12)],
        workers=[beat("rollout-0", "rollout", "wait:weights")],
        num_dead=2,
    )
    text = shown(dashboard(run))
    for expected in (
        "step 3/10", "30%", "2 s a step", "14 s left", "0.200", "0.650  first 0.310, best 0.720",
        "max 1  mean 0.50  (bound 1)", "groups to generate", "5", "scoring now", "12", "waits for weights",
        "dead letters", "rollout idle", "25%",
    ):  # fmt: skip
        assert expected in text, expected
    assert "trajectories to score" not in text, "what the server cannot tell is not guessed"


def test_a_run_that_has_not_begun_can_be_drawn() -> None:
    text = shown(dashboard(RunSnapshot("run-1", steps=10, max_staleness=1)))
    assert "starting" in text and "no process has reported yet" in text


def test_a_process_is_shown_as_its_supervisor_knows_it() -> None:
    services = {
        "a": ServiceStatus("a", "rollout", state="running", pid=7, restarts=1),
        "b": ServiceStatus("b", "rollout", state="running", pid=8),
        "c": ServiceStatus("c", "reward", state="restarting (by SIGKILL)"),
    }
    beats = [beat("a", "rollout", "generate"), beat("b", "rollout", "generate", pid=7)]
    lines = shown(dashboard(snapshot(workers=beats), services=services)).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[:1] in (["a"], ["b"], ["c"])}
    assert "generate" in rows["a"] and "restarted once" in rows["a"]
    assert "starting" in rows["b"], "the heartbeat is that of the process before"
    assert "restarting (by SIGKILL)" in rows["c"]


def test_a_silent_process_and_a_silent_redis_are_said() -> None:
    text = shown(dashboard(snapshot(workers=[beat("a", "reward", "score", age_s=75)]), silent_s=9))
    assert "silent for 1 min 15 s" in text and "Redis has not answered for 9 s" in text


def test_a_step_is_one_line() -> None:
    assert step_line(snapshot()) == "step 3/10  reward 0.200  staleness max 1  mean 0.50  150 tok/s  2.0 s"


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0], "▁"), ([0.0, 1.0], "▁█"), ([0.0, 0.0, 4.0, 4.0, 8.0, 8.0], "▁▁▅▅██")],
)
def test_a_sparkline_goes_from_lowest_to_highest(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_long_curve_is_averaged_into_its_columns() -> None:
    assert sparkline([0.0, 2.0, 3.0, 5.0], width=2) == "▁█"


@pytest.mark.parametrize(
    ("seconds", "text"), [(41.6, "42 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (59.7, "1 min 00 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_once_in_order_and_only_for_what_is_new() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    view = PlainView(console)
    view.show(snapshot(1), {}, 0.0)
    new = snapshot(3, state={"evaluations": [{"version": 2, "set": "held", "score": 0.5}]})
    view.show(new, {}, 0.0)
    view.show(new, {}, 0.0)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/10",
        "evaluation of version 2 on held: 0.500",
        "step 3/10",
    ]


def test_failures_of_rewards_are_shown_by_name_and_kind_over_all_workers() -> None:
    workers = [beat(f"reward-{number}", "reward", "score") for number in range(2)]
    workers[0].counts.update({"failures:judge:timeout": 3, "failures:judge:http_429": 1, "failed": 4})
    workers[1].counts.update({"failures:judge:timeout": 2})
    text = shown(dashboard(snapshot(workers=workers)))
    assert "failed: judge (timeout)" in text and "failed: judge (http_429)" in text
    assert text.split("failed: judge (timeout)")[1].split()[0] == "5"


WARNING = {
    "check": "entropy", "metric": "entropy", "since_step": 1, "until_step": None, "worst": 0.001,
    "text": "the policy has nearly stopped exploring", "advice": "Raise clip_high.",
}  # fmt: skip


def test_warnings_that_hold_are_in_the_dashboard_and_those_that_ended_are_not() -> None:
    state = {"warnings": [WARNING, {**WARNING, "text": "another", "until_step": 2}]}
    text = shown(dashboard(snapshot(state=state)))
    assert "warning  the policy has nearly stopped exploring (since step 2)." in " ".join(text.split(" "))
    assert "another" not in text
    assert snapshot(state=state).as_dict()["warnings"] == [WARNING]


def test_the_plain_view_says_a_warning_when_it_begins_and_when_it_ends() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    view = PlainView(console)
    for warnings in ([], [WARNING], [WARNING], [{**WARNING, "until_step": 2}]):
        view.show(snapshot(state={"warnings": warnings}), {}, 0.0)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "warning: the policy has nearly stopped exploring (since step 2). Raise clip_high.",
        "healthy again since step 3: entropy",
    ]


def test_the_summary_says_when_a_warning_held() -> None:
    assert spell_lines([WARNING])[0] == (
        "the policy has nearly stopped exploring (steps 2 to the end, at worst 0.001). Raise clip_high."
    )
    assert (
        "(steps 2 to 3, at worst not a number)"
        in spell_lines([{**WARNING, "until_step": 3, "worst": None}])[0]
    )
    (line,) = spell_lines([WARNING, {**WARNING, "since_step": 7, "until_step": 9}])
    assert "; steps 8 to 9, at worst" in line, "the same warning is told once"


def test_the_dashboard_names_the_slowest_stage_and_what_to_do() -> None:
    workers = [
        Heartbeat("t", "trainer", shares={"wait:scores": 0.7, "train": 0.3}, at=time.time()),
        Heartbeat("s", "reward", shares={"score": 1.0}, at=time.time()),
    ]
    text = " ".join(shown(dashboard(snapshot(workers=workers))).split())
    assert "slowest reward is the bottleneck: the trainer waits 70% of its time for scores" in text
    assert "1 reward worker scores 100% of what is possible" in text


def test_jobs_that_wait_or_failed_are_shown() -> None:
    jobs = {"sandbox": {"queued": 1200}, "jobs": {"started": 1, "failed": 2}}
    text = shown(dashboard(snapshot(1, jobs=jobs)))
    assert "jobs, code" in text and "1,200 waiting" in text
    assert "jobs, archive" in text and "1 busy, 2 failed" in text
