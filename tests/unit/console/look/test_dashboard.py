"""What people see of a run while it goes on, from snapshots made by hand or from its folder."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.trajectories import make_config
from tidemill.common.errors import ConfigError
from tidemill.common.process.failures import FailureLog
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.redis.broker import MemoryUse
from tidemill.services.console.__main__ import app
from tidemill.services.console.look.dashboard import (
    dashboard,
    evaluation_line,
    flow_lines,
    learning_lines,
    pace,
    process_table,
    sparkline,
    step_line,
)
from tidemill.services.console.look.report import spell_lines
from tidemill.services.console.look.snapshot import QueueDepth, RunSnapshot, StepPoint
from tidemill.services.console.run.end import RunEnd, write_end
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.service_status import ServiceStatus
from tidemill.services.console.text.formats import in_columns, printable, share, size
from tidemill.services.console.text.tree import value_text
from tidemill.services.console.up.views import PlainView

NAN = float("nan")
EVALUATIONS = [{"version": v, "set": "held", "score": s} for v, s in ((3, 0.65), (0, 0.31), (2, 0.72))]
WARNING = {
    "check": "entropy", "metric": "entropy", "since_step": 1, "until_step": None, "worst": 0.001,
    "text": "the policy has nearly stopped exploring", "advice": "Raise clip_high.",
}  # fmt: skip

FOLDER = RunFolder(Path("elsewhere"), "run-1")


def snapshot(num_steps: int = 3, **fields: Any) -> RunSnapshot:
    metrics = {"staleness/max": 1.0, "staleness/mean": 0.5, "completion_tokens": 300.0, "step_time_s": 2.0}
    points = [StepPoint(step, {"reward": step / 10, **metrics}, 0.0) for step in range(num_steps)]
    return RunSnapshot("run-1", steps=10, max_staleness=1, points=points, **fields)


def beat(
    name: str, role: str, state: str, pid: int = 7, age_s: float = 0.0, detail: str = "", **counts: float
) -> Heartbeat:
    at = time.time() - age_s
    return Heartbeat(name, role, state, detail, version=3, idle_share=0.25, pid=pid, at=at, counts=counts)


def lines(run: RunSnapshot) -> dict[str, str]:
    return {
        line.label: value_text(line.value, line.unit) for line in (*learning_lines(run), *flow_lines(run))
    }


def printed(run: RunSnapshot, width: int = 80, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(dashboard(run, FOLDER, **options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_leave_out_the_first_step() -> None:
    run = snapshot()
    run.points[0].metrics["step_time_s"] = 100.0
    assert (run.version, run.step_s, run.eta_s, run.tokens_per_s) == (3, 2.0, 14.0, 150.0)


def test_the_dashboard_fits_80_columns_and_says_where_things_stand() -> None:
    shares = {"trainer": {"wait:scores": 0.7, "train": 0.3}, "reward": {"score": 1.0}}
    workers = [Heartbeat(role, role, shares=shares[role], at=time.time()) for role in shares]
    text = printed(snapshot(state={"status": "running", "evaluations": EVALUATIONS}, workers=workers))
    assert all(len(line) <= 80 for line in text.splitlines())
    for expected in (
        "step 3/10", "30%", "2 s a step", "14 s left", "running", "slowest  reward is the bottleneck",
    ):  # fmt: skip
        assert expected in text, expected
    empty = printed(RunSnapshot("run-1", steps=10, max_staleness=1))
    assert "starting" in empty and "no process has reported yet" in empty
    assert "Redis has not answered for 9 s" in printed(snapshot(), silent_s=9)


def test_each_number_has_its_line() -> None:
    failures = {"failures:judge:timeout": 3, "failures:judge:http_429": 1, "failed": 4}
    run = snapshot(
        state={"evaluations": EVALUATIONS},
        queues=[QueueDepth("prompts", 9, 5, 4), QueueDepth("trajectories", 40, None, 12)],
        num_dead=2,
        jobs={"sandbox": {"queued": 1200, "started": 1, "failed": 2}},
        workers=[
            beat(
                "t", "trainer", "train", weights_bytes=2_500_000.0, weights_changed=0.014,
                weights_encode_s=0.3, checkpoint_copy_s=0.25, checkpoint_wait_s=3.0, checkpoint_write_s=12.0,
                outstanding=6.0,
            ),
            beat("a", "rollout", "generate", weights_load_s=0.5, weights_pause_s=0.01),
            beat("b", "rollout", "generate", weights_load_s=0.5, weights_pause_s=0.02, weight_mismatches=1),
            beat("c", "reward", "score", **failures),
            beat("d", "reward", "score", **{"failures:judge:timeout": 2}),
        ],
    )  # fmt: skip
    assert lines(run) == {
        "reward": "0.200  ▁▅█",
        "eval held": "0.650  first 0.310, best 0.720",
        "staleness": "max 1  mean 0.50  (bound 1)",
        "tokens/s": "150",
        "groups to generate": "5",
        "  generating now": "4",
        "  scoring now": "12",  # what the server cannot tell is not guessed
        "groups outstanding": "6",
        "entries in the streams": "49",
        "dead letters": "2",
        "jobs, sandbox": "1,200 waiting, 1 busy, 2 failed",
        "failed: judge (http_429)": "1",
        "failed: judge (timeout)": "5",
        "weights written": "2.5 MB, 1.4% changed",
        "  beside training": "300 ms",
        "checkpoint copied in": "250 ms",
        "  after a wait of": "3.0 s",
        "  written beside in": "12.0 s",
        "weights staged in": "500 ms",
        "  engine's pause": "20 ms",
        "engines with wrong weights": "1 times, repaired",
        "trainer idle": "25%",
        "rollout idle": "25%",
    }
    run.workers[0].counts["weights_changed"] = -1.0
    assert lines(run)["weights written"] == "2.5 MB"


def test_failures_are_seen_and_never_shown_as_numbers() -> None:
    failed = {"version": 0, "set": "held", "score": NAN, "num_failed": 12}
    run = snapshot(state={"evaluations": [failed]})
    run.points[0].metrics["groups_dropped"] = 2.0
    run.points[-1].metrics.update({"scores/failed_ratio": 0.25, "groups_dropped": 1.0})
    by_label = lines(run)
    assert by_label["eval held"] == "all failed (12 samples)"
    assert by_label["failed scores"].startswith("25.0%")
    assert by_label["replaced"] == "3 groups, 1 in the last step"
    assert step_line(run).endswith("25% of the scores failed  1 groups replaced")
    assert evaluation_line(failed).endswith("on held: all failed (12 samples)")
    assert evaluation_line({"score": 0.5, "num_failed": 2}).endswith("0.500 (2 failed)")
    survivors = {"score": 1.0, "num_samples": 37, "num_failed": 91, "reason": "KeyError: 'a' (my.py, line 4)"}
    assert evaluation_line(survivors).endswith(
        "1.000 of 37 of 128 samples; 91 failed: KeyError: 'a' (my.py, line 4)"
    )
    failed["reason"] = "KeyError: 'a' (my.py, line 4)"
    assert evaluation_line(failed).endswith("all failed (12 samples): KeyError: 'a' (my.py, line 4)")
    text = printed(run, 200)
    assert "failing  evaluation of version 0 on held: all failed (12 samples): KeyError: 'a'" in text
    assert step_line(snapshot()) == "step 3/10  reward 0.200  staleness max 1  mean 0.50  150 tok/s  2.0 s"


def test_a_process_is_shown_as_its_supervisor_and_its_heartbeat_know_it() -> None:
    services = {
        "a": ServiceStatus("a", "rollout", state="running", pid=7, restarts=1),
        "b": ServiceStatus("b", "rollout", state="running", pid=8),
        "c": ServiceStatus("c", "reward", state="restarting (by SIGKILL)"),
    }
    beats = [
        beat("a", "rollout", "generate"),
        beat("b", "rollout", "generate", pid=7),  # of the process before
        beat("d", "rollout", "wait:weights", damaged_version=4.0),
        beat("e", "reward", "score", age_s=75),
    ]
    run = snapshot(workers=beats)

    def states() -> dict[str, tuple[str, str]]:
        states_by_process = {}
        for row in process_table(run, services).children:
            cells = {cell.label: value_text(cell.value) for cell in row.children}
            states_by_process[cells["process"]] = (cells["state"], cells["what for"])
        return states_by_process

    assert states() == {
        "a": ("generate", "restarted once"),
        "b": ("starting", "–"),
        "c": ("restarting (by SIGKILL)", "–"),
        "d": ("waits for weights", "weights of version 4 are damaged"),
        "e": ("silent for 1 min 15 s", "–"),
    }
    run.memory = MemoryUse(1000, 1000)
    assert states()["e"] == ("cannot report: Redis is full", "–")
    assert "Redis is full" in printed(run, 200) and run.as_dict()["redis"]["is_full"]


def test_warnings_that_hold_are_shown_and_those_that_ended_are_not() -> None:
    state = {"warnings": [WARNING, {**WARNING, "text": "another", "until_step": 2}]}
    blocked = beat("reward-1", "reward", "score", detail="score (my.py, line 4)", blocking=1)
    run = snapshot(state=state, workers=[blocked, beat("reward-2", "reward", "score")])
    warnings = [line for line in printed(run, 200).splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning  the policy has nearly stopped exploring (since step 2). Raise clip_high.",
        "warning  reward-1: score (my.py, line 4)",
    ]
    assert run.as_dict()["warnings"] == [WARNING]
    run.config_warnings = ["reward.on_failure is 0: it is trained"]
    assert "warning  reward.on_failure is 0: it is trained" in printed(run, 200).splitlines()
    assert run.as_dict()["config_warnings"] == run.config_warnings
    many = printed(snapshot(state={"warnings": [WARNING] * 5}), 200)
    assert "and 2 older warnings" in many


def test_the_summary_says_when_a_warning_held() -> None:
    assert spell_lines([WARNING]) == [
        "the policy has nearly stopped exploring (steps 2 to the end, at worst 0.001). Raise clip_high."
    ]
    (line,) = spell_lines(
        [{**WARNING, "until_step": 3, "worst": None}, {**WARNING, "since_step": 7, "until_step": 9}]
    )
    assert "(steps 2 to 3, at worst not a number; steps 8 to 9, at worst 0.001)" in line


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([NAN], ""), ([1.0], "▁"), ([0.0, 1.0], "▁█"), ([0.0, 0.0, 4.0, 4.0, 8.0, 8.0], "▁▁▅▅██")],
)
def test_a_sparkline_goes_from_lowest_to_highest(values: list[float], line: str) -> None:
    assert sparkline(values) == line
    assert sparkline([0.0, 2.0, 3.0, 5.0], width=2) == "▁█", "columns are means"


def test_plain_lines_come_once_in_order_and_only_for_what_is_new() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    view = PlainView(console)
    view.show(snapshot(1, state={"warnings": []}), {}, 0.0)
    new = {"evaluations": EVALUATIONS[2:]}
    for warnings in ([WARNING], [WARNING], [{**WARNING, "until_step": 2}]):
        view.show(snapshot(3, state={**new, "warnings": warnings}), {}, 0.0)
    printed_lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[0] for line in printed_lines] == [
        "step 2/10",
        "evaluation of version 2 on held: 0.720",
        "step 3/10",
        "warning: the policy has nearly stopped exploring (since step 2). Raise clip_high.",
        "healthy again since step 3: entropy",
    ]


def test_a_run_whose_redis_is_gone_is_read_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    folder = RunFolder(tmp_path, "one")

    def status(*arguments: str) -> str:
        line = ["status", "one", "--runs-dir", str(tmp_path), *arguments]
        return CliRunner().invoke(app, line, catch_exceptions=False).output

    (tmp_path / "once").mkdir()
    with pytest.raises(
        ConfigError, match=r"no Redis to ask, and .*/one does not exist\. Did you mean .*/once\?"
    ):
        status()
    folder.create(make_config(run_id="one", trainer={"steps": 8}))
    steps = [
        {"kind": "step", "step": i, "time": 1.0 + i, "reward": i / 10, "step_time_s": 2.0} for i in range(3)
    ]
    evaluation = {"kind": "evaluation", "version": 0, "set": "held", "time": 1.0, "score": 0.31}
    text = "".join(json.dumps(line) + "\n" for line in [*steps, evaluation])
    (folder.path / "metrics.jsonl").write_text(text)
    (folder.path / "checkpoints" / "v00000002").mkdir(parents=True)
    write_end(folder, RunEnd("stopped", steps=3, of_steps=8, resume="tidemill up c.yaml --resume"))
    for expected in ("stopped", "step 3/8", "0.200", "0.310", "its Redis is not there", "version 2"):
        assert expected in status(), expected
    tree = json.loads(status("--json"))
    assert (tree["status"], tree["version"], tree["metrics"]["reward"]) == ("stopped", 3, 0.2)
    assert tree["source"] == str(folder.path) and tree["end"]["resume"] == "tidemill up c.yaml --resume"
    assert "continue with: tidemill up c.yaml --resume" in status()
    assert "TIDEMILL_REDIS_URL" not in status(), "a run that has ended needs no address"
    failed = RunEnd("failed", reason="trainer cannot do this run", error="model.path /m is not there")
    write_end(folder, failed)
    assert json.loads(status("--json"))["status"] == "failed"
    assert failed.reason in status() and failed.error in status()
    folder.write_address("redis://127.0.0.1:1")
    assert "step 3/8" in status(), "a Redis that does not answer is no obstacle"
    folder.summary.write_text(json.dumps({"ok": True, "run_id": "one", "steps": 8, "bottleneck": None}))
    assert json.loads(status("--json"))["ok"] and "everything that was expected" in status()


def failing(count: int, reason: str = "KeyError: 'a' (my.py, line 4)", name: str = "reward-0") -> Heartbeat:
    """A reward worker's heartbeat after so many failed attempts."""
    log = FailureLog()
    log.note("reward mine", "error", reason, count)
    worker = beat(name, "reward", "score", failing_share=1.0)
    worker.failures = log.failures
    return worker


def test_a_failure_is_said_at_once_and_at_each_doubling_with_its_reason() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    view = PlainView(console)
    for count in (1, 1, 2, 3, 3, 9, 15):
        view.show(snapshot(0, workers=[failing(count, f"KeyError: '{count}' (my.py, line 4)")]), {}, 0.0)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == [
        "failing: reward mine failed once (error): KeyError: '1' (my.py, line 4)",
        "failing: reward mine failed 2 times (error): KeyError: '2' (my.py, line 4)",
        "failing: reward mine failed 9 times (error): KeyError: '9' (my.py, line 4)",
    ]
    run = snapshot(workers=[failing(3), failing(4, name="reward-1")])
    assert "failing  reward mine failed 7 times (error): KeyError: 'a' (my.py, line 4)" in printed(run, 200)
    assert run.as_dict()["failures"][0]["count"] == 7


def test_a_blocked_loop_is_said_once_for_its_line_and_a_busy_machine_once_for_all() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    view = PlainView(console)
    for seconds in (1.2, 3.4, 5.6):
        detail = f"the event loop was blocked for {seconds} s: score (my.py, line 4)"
        blocked = beat("reward-0", "reward", "score", detail=detail, blocking=1)
        starved = beat("rollout-0", "rollout", "generate", starved=seconds, starved_s=seconds)
        view.show(snapshot(0, workers=[blocked, starved]), {}, 0.0)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2 and lines[0].startswith("warning: reward-0: the event loop was blocked for 1.2 s")
    assert lines[1].startswith("warning: short of CPU: rollout-0 ")


def test_what_blocks_a_process_is_said_once_in_a_view() -> None:
    blocked = beat(
        "reward-0", "reward", "score", detail="blocked for 1.2 s: score (my.py, line 4)", blocking=1
    )
    assert printed(snapshot(1, workers=[blocked]), 200).count("blocked for 1.2 s") == 1


def test_of_a_run_that_is_over_nothing_is_shown_that_only_its_redis_knew() -> None:
    text = printed(snapshot(state={"status": "stopped", "evaluations": EVALUATIONS}))
    assert "eval held" in text and "first 0.310, best 0.720" in text, "what is left has the whole width"
    assert "no process reports" in printed(snapshot(state={"status": "running"}))
    for absent in ("s left", "entries in the streams", "no process has reported yet"):
        assert absent not in text, absent


def test_a_number_that_has_no_room_never_loses_digits_in_silence() -> None:
    evaluations = [{"version": v, "set": "held_out", "score": s} for v, s in ((0, 0.289), (3, 0.734))]
    timed = beat("trainer", "trainer", "train", checkpoint_copy_s=0.00472, weights_bytes=3_890_000.0)
    run = snapshot(state={"status": "running", "evaluations": evaluations}, workers=[timed])
    for width in range(60, 90):
        (line,) = (line for line in printed(run, width).splitlines() if line.startswith("eval"))
        assert "best 0.734" in line or "…" in line, line
    assert "best 0.734" in printed(run, 80)


def test_while_a_run_loads_no_stage_is_blamed() -> None:
    trainer = beat("trainer", "trainer", "train")
    rollout = beat("rollout-0", "rollout", "generate")
    trainer.shares = {"load": 0.8, "wait:trajectories": 0.2}
    rollout.shares = {"generate": 1.0}
    assert snapshot(0, workers=[trainer, rollout], state={"status": "running"}).bottleneck is None
    trainer.shares = {"wait:trajectories": 1.0}
    run = snapshot(0, workers=[trainer, rollout], state={"status": "running"})
    assert run.bottleneck is not None, "a minute later"


def test_a_small_share_has_no_long_row_of_digits() -> None:
    assert [share(value) for value in (0.000000442, 0.00125, 0.0288, 0.575, 1.0)] == [
        "0%", "0.125%", "2.88%", "57.5%", "100%",
    ]  # fmt: skip


def test_sizes_shares_and_times_have_no_exponents() -> None:
    assert [size(value) for value in (0, 999, 999_400, 999_600, 1.2e9, 999.6e9, 1.2345e15)] == [
        "0 B", "999 B", "999 kB", "1 MB", "1.2 GB", "1 TB", "1,234 TB",
    ]  # fmt: skip
    assert [share(value) for value in (9.999, 12.345)] == ["1,000%", "1,234%"]
    assert [value_text(value) for value in (0.12345, 9999.0, 12345.6)] == ["0.1235", "9999", "12,346"]
    points = [StepPoint(1, {"step_time_s": 127.0}, 0.0)]
    slow = RunSnapshot("run-1", steps=10, max_staleness=1, points=points)
    assert "127 s a step" in pace(slow)


def test_a_text_is_cut_off_only_where_it_is_too_long() -> None:
    assert [printable(text, 4) for text in ("abcd", "abcde", "a\n", "ab\n", "abc\n")] == [
        "abcd", "abc…", "a\\n", "ab\\n", "abc…",
    ]  # fmt: skip
    assert printable("a" * 5000 + "\n").endswith("a\\n")


def test_what_to_do_next_fits_a_narrow_terminal() -> None:
    steps = {"tidemill web a": "in a browser", "a/tutorial.md": "your own data"}
    assert in_columns(steps, 80) == ["  tidemill web a  in a browser", "  a/tutorial.md   your own data"]
    narrow = ["  in a browser:", "    tidemill web a", "  your own data:", "    a/tutorial.md"]
    assert in_columns(steps, 25) == narrow


@pytest.mark.parametrize("height", [16, 24, 50])
def test_the_live_view_fits_the_terminal_the_most_important_first(height: int) -> None:
    workers = [beat(f"rollout-{i}", "rollout", "generate", requests=3.0) for i in range(12)]
    workers += [beat("reward-9", "reward", "score", age_s=75), failing(924)]
    state = {"status": "running", "evaluations": EVALUATIONS, "warnings": [WARNING] * 3}
    run = snapshot(state=state, workers=workers, num_dead=3)
    run.points[-1].metrics.update({"entropy": 0.1, "grad_norm": 1.0, "scores/failed_ratio": 0.9})
    events = [f"event {number}" for number in range(5)]
    console = Console(file=io.StringIO(), width=80, height=height, color_system=None)
    console.print(dashboard(run, FOLDER, events=events, hint="Ctrl-C stops the run", console=console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert len(lines) < height and all(len(line) <= 80 for line in lines)
    assert "failing  reward mine failed 924 times" in text and "step 3/10" in text
    assert "stopped exploring" in text, "a warning"
    if height == 24:
        assert "silent for 1 min" in text, "of the processes, those that do not work come first"
        assert re.search(r"not shown: \d+ of \d+ processes", text)
        assert re.search(r"not shown: \d+ of \d+ rows of numbers", text)
    if height == 50:
        assert not re.search("not shown: .* processes", text)
