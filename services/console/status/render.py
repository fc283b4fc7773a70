"""Draws a snapshot for people: what was learned, where things stand, who waits for what.

Pure functions of what they are given; they gather nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.common.process.activity import WAIT
from tidemill.common.process.heartbeats import DAMAGED_VERSION, FAILURES, Heartbeat
from tidemill.common.run.state import FINISHED
from tidemill.services.console.processes.supervisor import ServiceStatus
from tidemill.services.console.status.snapshot import RunSnapshot
from tidemill.services.console.text.formats import NOTHING, duration, printable, size, took

MAX_WARNINGS = 3
"""Warnings in the dashboard, the newest."""
STATUS_STYLES = {"running": "green", "finished": "bold green", "failed": "bold red", "stopped": "yellow"}
QUEUE_WORDS = {
    "prompts": ("groups to generate", "generating"),
    "trajectories": ("trajectories to score", "scoring"),
    "prompts:eval": ("eval groups to generate", "generating"),
    "trajectories:eval": ("eval to score", "scoring"),
}
JOB_WORDS = {"sandbox": "code", "jobs": "archive"}
"""What RQ's queues are for."""


FULL = (
    "It refuses writes, so that processes wait and cannot report; nothing is lost. Raise its maxmemory "
    "(CONFIG SET maxmemory); the trainer's log says what it may free."
)
PATIENCE_S = 3.0
"""A snapshot older than this says that Redis does not answer."""
BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 22
"""With it the dashboard fits a terminal of 80 columns."""


def dashboard(
    snapshot: RunSnapshot,
    *,
    services: Mapping[str, ServiceStatus] | None = None,
    events: Sequence[str] = (),
    hint: str = "",
    silent_s: float = 0.0,
) -> RenderableType:
    """The whole live view. `silent_s` is how old the snapshot is: Redis may not answer."""
    parts: list[RenderableType] = [_header(snapshot), _progress(snapshot), ""]
    if silent_s > PATIENCE_S:
        parts.insert(1, Text(f"Redis has not answered for {silent_s:.0f} s; showing what was", "yellow"))
    if snapshot.memory.is_full:
        used, allowed = size(snapshot.memory.used_bytes), size(snapshot.memory.max_bytes)
        parts.insert(1, Text(f"Redis is full ({used} of {allowed}). {FULL}", "bold red"))
    columns = Table.grid(padding=(0, 3))
    columns.add_row(_learning(snapshot), _flow(snapshot))
    parts += [columns, *_bottleneck(snapshot), "", _workers(snapshot, services or {})]
    parts += _warnings(snapshot)
    parts += [Text(event, style="yellow", overflow="ellipsis", no_wrap=True) for event in events]
    if hint:
        parts.append(Text(hint, style="dim"))
    return Group(*parts)


def _header(snapshot: RunSnapshot) -> Text:
    status = snapshot.status
    return Text.assemble(
        ("tidemill ", "bold"), (snapshot.run_id, "bold cyan"), "  ", (status, STATUS_STYLES.get(status, ""))
    )


def _progress(snapshot: RunSnapshot) -> RenderableType:
    done, steps = snapshot.version, snapshot.steps
    row = Table.grid(padding=(0, 2))
    tail = [f"{done / steps:.0%}"]
    if snapshot.step_s is not None:
        tail.append(f"{snapshot.step_s:.2g} s a step")
    if snapshot.eta_s and done < steps:
        tail.append(f"{duration(snapshot.eta_s)} left")
    row.add_row(
        Text(f"step {done}/{steps}", "bold"), ProgressBar(steps, done, width=40), Text("  ".join(tail))
    )
    return row


def _learning(snapshot: RunSnapshot) -> Table:
    table = _grid()
    table.add_row("reward", _with_curve(snapshot, "reward", ".3f"))
    for name, line in _evaluations(snapshot):
        table.add_row(name, line)
    table.add_row("staleness", _staleness(snapshot))
    rate = snapshot.tokens_per_s
    table.add_row("tokens/s", f"{rate:,.0f}" if rate is not None else NOTHING)
    for label, name, form in (
        ("length", "completions/mean_length", ",.1f"),
        ("turns", "sessions/mean_turns", ",.1f"),
        ("environment", "sessions/environment_tokens_share", ".0%"),
        ("cut off", "completions/clipped_ratio", ".1%"),
        ("entropy", "entropy", ".3f"),
        ("grad norm", "grad_norm", ".3g"),
    ):
        value = snapshot.metric(name)
        if value is not None:
            table.add_row(label, f"{value:{form}}")
    if failed := snapshot.metric("scores/failed_ratio"):
        table.add_row("failed scores", Text(f"{failed:.1%} of the last step", "red"))
    if replaced := sum(snapshot.curve("groups_dropped")):
        last = snapshot.metric("groups_dropped") or 0.0
        table.add_row("replaced", Text(f"{replaced:,.0f} groups, {last:,.0f} in the last step", "yellow"))
    return table


def _bottleneck(snapshot: RunSnapshot) -> list[RenderableType]:
    """Which stage makes the run slow, why that is said, and what to do."""
    verdict = snapshot.bottleneck
    if verdict is None or snapshot.status == FINISHED or snapshot.memory.is_full:
        return []
    return [
        "",
        Text.assemble(("slowest  ", "bold magenta"), verdict.text),
        Text(f"  {verdict.advice}", "dim"),
    ]


def _warnings(snapshot: RunSnapshot) -> list[Text]:
    """The newest warnings that hold; all of them are in the run's state and in the trainer's log."""
    held = snapshot.warnings
    lines = [Text.assemble(("warning  ", "bold yellow"), warning_line(item)) for item in held[-MAX_WARNINGS:]]
    if len(held) > MAX_WARNINGS:
        lines.append(Text(f"and {len(held) - MAX_WARNINGS} older warnings: tidemill status --json", "yellow"))
    for name, note in snapshot.blocked.items():
        lines.append(Text.assemble(("warning  ", "bold yellow"), printable(f"{name}: {note}")))
    return lines


def _with_curve(snapshot: RunSnapshot, name: str, form: str) -> Text:
    value = snapshot.metric(name)
    if value is None:
        return Text(NOTHING)
    return Text.assemble((f"{value:{form}}  ", "bold"), (sparkline(snapshot.curve(name)), "cyan"))


def _evaluations(snapshot: RunSnapshot) -> list[tuple[str, Text]]:
    """For each dataset: first, last and best score."""
    by_set: dict[str, list[float]] = {}
    newest: dict[str, Mapping[str, object]] = {}
    for item in snapshot.evaluations:
        name = str(item.get("dataset"))
        newest[name] = item
        scores = by_set.setdefault(name, [])
        if isinstance(score := item.get("score"), int | float) and score == score:
            scores.append(score)
    lines = []
    for name, scores in by_set.items():
        shown = score_text(newest[name])
        text = Text.assemble((shown, "bold red" if shown.startswith("all failed") else "bold"))
        if len(scores) > 1:
            text.append(f"  first {scores[0]:.3f}, best {max(scores):.3f}")
        lines.append((f"eval {name}", text))
    return lines or [("evaluation", Text(NOTHING))]


def _staleness(snapshot: RunSnapshot) -> Text:
    seen = snapshot.curve("staleness/max")
    if not seen:
        return Text(f"{NOTHING} (bound {snapshot.max_staleness})")
    mean = snapshot.metric("staleness/mean")
    style = "bold" if max(seen) <= snapshot.max_staleness else "bold red"
    text = Text(f"max {max(seen):.0f}", style)
    text.append(f"  mean {mean:.2f}" if mean is not None else "")
    return text.append(f"  (bound {snapshot.max_staleness})")


def _flow(snapshot: RunSnapshot) -> Table:
    table = _grid(justify="right")
    for queue in snapshot.queues:
        if queue.name == "scores":
            continue
        waiting, held = QUEUE_WORDS.get(queue.name, (f"{queue.name} waiting", "held"))
        if queue.waiting is not None:
            table.add_row(waiting, f"{queue.waiting:,}")
        table.add_row(f"  {held} now", f"{queue.held:,}")
    for label, name in (("groups outstanding", "outstanding"), ("groups ready to train", "complete")):
        counts = [beat.counts[name] for beat in snapshot.workers if name in beat.counts and beat.is_alive]
        if counts:
            table.add_row(label, f"{sum(counts):,.0f}")
    held_entries = sum(queue.length for queue in snapshot.queues)
    table.add_row("entries in the streams", f"{held_entries:,}")
    table.add_row("dead letters", Text(f"{snapshot.num_dead:,}", "bold red" if snapshot.num_dead else ""))
    for queue_name, states in snapshot.jobs.items():
        table.add_row(f"jobs, {JOB_WORDS.get(queue_name, queue_name)}", _job_text(states))
    for name, count in sorted(_reward_failures(snapshot).items()):
        table.add_row(Text(f"failed: {printable(name)}"), Text(f"{count:,.0f}", "red"))
    for label, text in weights_texts(snapshot.workers):
        table.add_row(label, text)
    if wrong := sum(beat.counts.get("weight_mismatches", 0) for beat in snapshot.workers):
        table.add_row("engines with wrong weights", Text(f"{wrong:,.0f} times, repaired", "bold red"))
    for role in ("trainer", "rollout"):
        idle = snapshot.idle_share(role)
        table.add_row(f"{role} idle", f"{idle:.0%}" if idle is not None else NOTHING)
    return table


def weights_texts(workers: Sequence[Heartbeat]) -> Iterator[tuple[str, str]]:
    """What the newest version and checkpoint took to write, and the slowest engine to take in the version."""
    counts = [beat.counts for beat in workers if beat.is_alive]
    for own in counts:
        if "weights_bytes" in own:
            changed = own.get("weights_changed", -1.0)
            share = f", {changed:.1%} changed" if changed >= 0.0 else ""
            yield "weights written", f"{size(own['weights_bytes'])}{share}"
            yield "  beside training", took(own.get("weights_encode_s", 0.0))
        if "checkpoint_copy_s" in own:
            yield "checkpoint copied in", took(own["checkpoint_copy_s"])
            yield "  after a wait of", took(own.get("checkpoint_wait_s"))
            yield "  written beside in", took(own.get("checkpoint_write_s"))
    for name, label in (("weights_load_s", "weights staged in"), ("weights_pause_s", "  engine's pause")):
        if seconds := [own[name] for own in counts if name in own]:
            yield label, took(max(seconds))


def _job_text(states: Mapping[str, int]) -> Text:
    """What waits, is being done, and has failed."""
    words = {"queued": "waiting", "started": "busy", "failed": "failed"}
    said = [f"{states[state]:,} {word}" for state, word in words.items() if state in states]
    return Text(", ".join(said), "bold red" if "failed" in states else "")


def _reward_failures(snapshot: RunSnapshot) -> dict[str, float]:
    """How often each reward failed for good, as `<reward> (<kind>)`, over all workers."""
    totals: dict[str, float] = {}
    for beat in snapshot.workers:
        for name, count in beat.counts.items():
            if name.startswith(FAILURES):
                reward, _, kind = name.removeprefix(FAILURES).rpartition(":")
                label = f"{reward} ({kind})"
                totals[label] = totals.get(label, 0) + count
    return totals


def _workers(snapshot: RunSnapshot, services: Mapping[str, ServiceStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    for title in ("process", "state", "version", "idle"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("version", "idle") else "left")
    table.add_column("what for", overflow="ellipsis", no_wrap=True)
    beats = {beat.name: beat for beat in snapshot.workers}
    names = list(services) + [name for name in beats if name not in services]
    for name in names:
        row = _worker_row(beats.get(name), services.get(name), snapshot.memory.is_full)
        table.add_row(Text(printable(name)), *row)
    if not names:
        table.add_row(Text("no process has spoken yet", "dim"))
    return table


def _worker_row(
    beat: Heartbeat | None, service: ServiceStatus | None, is_redis_full: bool
) -> tuple[RenderableType, ...]:
    restarts = _times(service.restarts) if service else ""
    if service is not None and service.state != "running":
        return Text(service.state, "yellow"), NOTHING, NOTHING, restarts
    is_own = service is None or (beat is not None and beat.pid == service.pid)
    if beat is None or not is_own:
        return Text("starting", "yellow"), NOTHING, NOTHING, restarts
    if not beat.is_alive and is_redis_full:
        return Text("cannot report: Redis is full", "yellow"), NOTHING, NOTHING, restarts
    if not beat.is_alive:
        return Text(f"silent for {duration(max(0.0, beat.age_s))}", "bold red"), NOTHING, NOTHING, restarts
    version = str(beat.version) if beat.version >= 0 else NOTHING
    damaged = beat.counts.get(DAMAGED_VERSION)
    unusable = "" if damaged is None else f"weights of version {damaged:g} are damaged"
    details = [part for part in (unusable, beat.detail, restarts) if part]
    return _state_text(beat.state), version, f"{beat.idle_share:.0%}", Text(printable("; ".join(details)))


def _times(restarts: int) -> str:
    return {0: "", 1: "restarted once"}.get(restarts, f"restarted {restarts} times")


def _state_text(state: str) -> Text:
    if state.startswith(WAIT):
        return Text(printable(f"waits for {state.removeprefix(WAIT).replace('_', ' ')}"), "yellow")
    return Text(printable(state.replace("_", " ")) or NOTHING, "green")


def _grid(justify: str = "left") -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    return table


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The course of `values` in `width` characters: each the mean of its part, from lowest to highest."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for column in range(width):
        part = finite[column * len(finite) // width : (column + 1) * len(finite) // width]
        means.append(sum(part) / len(part))
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5) if span else 0] for mean in means)


def step_line(snapshot: RunSnapshot, index: int = -1) -> str:
    """One committed step as one line of plain text."""
    point = snapshot.points[index]
    metrics = point.metrics
    parts = [f"step {point.step + 1}/{snapshot.steps}"]
    for label, name, form in (
        ("reward", "reward", ".3f"),
        ("staleness max", "staleness/max", ".0f"),
        ("mean", "staleness/mean", ".2f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    seconds = metrics.get("step_time_s")
    if seconds:
        parts.append(f"{metrics.get('completion_tokens', 0.0) / seconds:,.0f} tok/s")
        parts.append(f"{seconds:.1f} s")
    if failed := metrics.get("scores/failed_ratio"):
        parts.append(f"{failed:.0%} of the scores failed")
    if replaced := metrics.get("groups_dropped"):
        parts.append(f"{replaced:.0f} groups replaced")
    return "  ".join(parts)


def evaluation_line(evaluation: Mapping[str, object]) -> str:
    """One evaluation as one line of plain text."""
    shown = score_text(evaluation)
    return f"evaluation of version {evaluation.get('version')} on {evaluation.get('dataset')}: {shown}"


def warning_line(warning: Mapping[str, object]) -> str:
    """One warning of the trainer's diagnostics as one line of plain text; or that it is over."""
    until, metric = warning.get("until_step"), warning.get("metric")
    if isinstance(until, int):
        return f"healthy again since step {until + 1}: {metric}"
    since = warning.get("since_step")
    begun = f" (since step {since + 1})" if isinstance(since, int) else ""
    return f"{warning.get('text')}{begun}. {warning.get('advice')}"


def score_text(evaluation: Mapping[str, object]) -> str:
    """The score of an evaluation, and how many samples have none: a failure is never a zero."""
    score, num_failed = evaluation.get("score"), evaluation.get("num_failed")
    failed = f"{num_failed:,.0f}" if isinstance(num_failed, int | float) and num_failed else ""
    if not isinstance(score, int | float) or score != score:
        return f"all failed ({failed} samples)" if failed else "all failed"
    return f"{score:.3f}" + (f" ({failed} failed)" if failed else "")
