"""`tidemill status`: what a run has learned, its queues, and what each process waits for. It only reads."""

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.common.digits import few_digits
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.activity import WAIT
from tidemill.common.process.failures import Failure
from tidemill.common.process.heartbeats import DAMAGED_VERSION, FAILURES, STARVED, STARVED_S, Heartbeat
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import FAILED, FINISHED, REASON, RUNNING, STOPPED
from tidemill.services.console.commands import StatusOptions
from tidemill.services.console.look.fitting import Section, fitted, whole
from tidemill.services.console.look.report import print_report, read_report, show_report
from tidemill.services.console.look.snapshot import RunSnapshot, SnapshotReader, read_folder
from tidemill.services.console.run.end import LOST, RunEnd, read_end
from tidemill.services.console.run.folder import RunFolder, connected, find_run, log_nothing
from tidemill.services.console.run.service_status import ServiceStatus
from tidemill.services.console.text.formats import NOTHING, duration, plural, printable, size
from tidemill.services.console.text.tree import Node, lines_table, rows_table, table

REFRESH_S = 1.0
HINT = "Ctrl-C ends the watching; the run goes on"
MAX_WARNINGS = 3
STATUS_STYLES = {
    "running": "green",
    "finished": "bold green",
    "failed": "bold red",
    "stopped": "yellow",
    LOST: "bold red",
}
OVER = (FINISHED, FAILED, STOPPED, LOST)
QUEUE_WORDS = {
    "prompts": ("groups to generate", "generating"),
    "trajectories": ("trajectories to score", "scoring"),
    "prompts:eval": ("eval groups to generate", "generating"),
    "trajectories:eval": ("eval to score", "scoring"),
}
FULL = (
    "It refuses writes, so that processes wait and cannot report; nothing is lost. Raise its maxmemory "
    "(CONFIG SET maxmemory); the trainer's log says what it may free."
)
DISK_FULL = (
    "It refuses writes, so that processes wait and cannot report; nothing is lost. Free some space on the "
    "disk of the run's folder, or of its server."
)
PATIENCE_S = 3.0
"""With a snapshot older than this, the view says that Redis does not answer."""
BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 22
"""With it the dashboard fits a terminal of 80 columns."""


def show_status(options: StatusOptions) -> int:
    """Show the run's state in Redis; without its Redis the summary, or what its folder has."""
    if options.watch and (options.report or options.as_json):
        raise ConfigError("--watch goes with neither --report nor --json.")
    if options.fails_on_warning and not options.report:
        raise ConfigError("--fail-on-warning goes with --report.")
    if options.report:
        return show_report(options)
    log_nothing()
    folder = find_run(options.run_id, options.runs_dir)
    console = Console(highlight=False)
    if options.watch and not console.is_terminal:
        raise ConfigError("--watch needs a terminal; leave it out, or take --json for programs.")
    report = read_report(folder)
    snapshot: RunSnapshot | None = None
    try:
        if options.watch:
            with contextlib.suppress(KeyboardInterrupt):
                run_main(_watch(folder, console))
            return 0
        snapshot = run_main(_look(folder))
    except TidemillError as error:
        if report is None:
            _print_folder(folder, options.as_json, error)
            return 0
    if snapshot is not None and snapshot.status not in (FINISHED, FAILED, STOPPED):
        _note_loss(snapshot, folder)
    if snapshot is not None and options.as_json:
        print(json.dumps(snapshot.as_dict(), indent=2))
    elif snapshot is not None and (report is None or snapshot.status != FINISHED):
        console.print(dashboard(snapshot, folder))
        _print_end(console, snapshot.end)
    elif report is not None and options.as_json:
        print(json.dumps(report, indent=2))
    elif report is not None:
        print_report(console, folder, report)
    return 0


async def _look(folder: RunFolder) -> RunSnapshot:
    async with connected(folder) as broker:
        return await (await SnapshotReader.attach(broker, folder.run_id)).read()


def _print_folder(folder: RunFolder, as_json: bool, error: TidemillError) -> None:
    """Show a run from its folder, and why its Redis could not be read."""
    if folder.config() is None:
        raise error
    snapshot, words = read_folder(folder)
    if as_json:
        print(json.dumps(snapshot.as_dict() | {"source": str(folder.path), "note": words}, indent=2))
        return
    console = Console(highlight=False)
    console.print(dashboard(snapshot, folder))
    console.print(Text(words, "dim"), soft_wrap=True)
    _print_end(console, snapshot.end)
    if snapshot.status == RUNNING:  # then its Redis should answer
        console.print(Text(str(error), "dim"), soft_wrap=True)


def _print_end(console: Console, end: RunEnd | None) -> None:
    """Say how the run ended, why, and how it goes on."""
    if end is None or not end.is_over:
        return
    style = STATUS_STYLES.get(end.status, "")
    for line in end.lines:
        console.print(Text(printable(line), style), soft_wrap=True)


def _note_loss(snapshot: RunSnapshot, folder: RunFolder) -> None:
    """Redis says `running` for ever where the launcher was killed: its folder and heartbeats know better."""
    if any(beat.is_alive for beat in snapshot.workers):
        return
    end = read_end(folder)
    if end.pid and end.status == LOST:
        snapshot.state |= {"status": LOST, "end": asdict(end)}


async def _watch(folder: RunFolder, console: Console) -> None:
    """Show the live view until Ctrl-C."""
    async with connected(folder) as broker:
        reader = await SnapshotReader.attach(broker, folder.run_id)
        snapshot = await reader.read()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            pending: asyncio.Task[RunSnapshot] | None = None
            while True:
                # Redis may be away: then the last picture stays, and says how old it is.
                pending = pending or asyncio.create_task(reader.read())
                done, _ = await asyncio.wait({pending}, timeout=REFRESH_S)
                if done:
                    snapshot = pending.result()
                    pending = None
                silent_s = time.time() - snapshot.at
                picture = dashboard(snapshot, folder, hint=HINT, silent_s=silent_s, console=console)
                live.update(picture, refresh=True)
                await asyncio.sleep(REFRESH_S if done else 0.0)


def dashboard(
    snapshot: RunSnapshot,
    folder: RunFolder,
    *,
    services: Mapping[str, ServiceStatus] | None = None,
    events: Sequence[str] = (),
    hint: str = "",
    silent_s: float = 0.0,
    console: Console | None = None,
) -> RenderableType:
    """The whole live view; with a console, as much of it as fits, the most important first. `silent_s` is how
    old the snapshot is: Redis may not answer."""
    sections = list(_sections(snapshot, folder, services, events, hint, silent_s))
    return whole(sections) if console is None else fitted(sections, console, console.height - 1)


def _sections(
    snapshot: RunSnapshot,
    folder: RunFolder,
    services: Mapping[str, ServiceStatus] | None,
    events: Sequence[str],
    hint: str,
    silent_s: float,
) -> Iterator[Section]:
    """The parts of the view from top to bottom."""
    status = snapshot.status
    in_full = folder.command("status")
    name = (snapshot.run_id, "bold cyan")
    state = (status, STATUS_STYLES.get(status, ""))
    head: list[RenderableType] = [Text.assemble(("tidemill ", "bold"), name, "  ", state)]
    if snapshot.memory.is_full:
        used = size(snapshot.memory.used_bytes)
        allowed = size(snapshot.memory.max_bytes)
        head.append(Text(f"Redis is full ({used} of {allowed}). {FULL}", "bold red"))
    if snapshot.append_only_error:
        head.append(Text(f"Redis cannot write to its disk. {DISK_FULL}", "bold red"))
    if silent_s > PATIENCE_S:
        head.append(Text(f"Redis has not answered for {silent_s:.0f} s; showing what was", "yellow"))
    head.append(_progress(snapshot))
    yield Section("lines", head, _group, importance=9, least=len(head) + 1)
    failing = [Text.assemble(("failing  ", "bold red"), printable(text)) for text in failure_lines(snapshot)]
    yield Section("causes of failure", failing, _group, importance=8, least=4)
    numbers = _rows_of_numbers(snapshot)
    yield Section(f"rows of numbers: {in_full}", numbers, _columns, importance=2, least=4, has_space=True)
    verdict = snapshot.bottleneck
    if verdict is not None and snapshot.status != FINISHED and not snapshot.memory.is_full:
        slowest = [Text.assemble(("slowest  ", "bold magenta"), verdict.text)]
        slowest.append(Text(f"  {verdict.advice}", "dim"))
        yield Section("lines of advice", slowest, _group, importance=5, least=4, has_space=True)
    # What blocks a process is a warning below, and once is enough.
    rows = process_table(snapshot, services, snapshot.blocked).children
    if rows:
        # Where not all have room, those that do not work are shown.
        yield Section(
            f"processes: {in_full}",
            rows,
            _process_rows,
            importance=6,
            least=7,
            has_space=True,
            urgency=_urgency,
        )
    elif snapshot.status not in OVER:
        silent = "no process reports" if snapshot.points else "no process has reported yet"
        nobody = [Text(silent, "dim")]
        yield Section("lines", nobody, _group, importance=6, has_space=True)
    warnings = list(_warnings(snapshot, folder))
    yield Section(f"warnings: {in_full}", warnings, _group, importance=7, least=4, has_space=True)
    news = [Text(event, style="yellow", overflow="ellipsis", no_wrap=True) for event in reversed(events)]
    yield Section("events", news, lambda items: Group(*reversed(items)), importance=4, least=2)
    if hint:
        yield Section("lines", [Text(hint, style="dim")], _group, importance=1)


def _group(items: Sequence[RenderableType]) -> RenderableType:
    return Group(*items)


def _rows_of_numbers(snapshot: RunSnapshot) -> list[tuple[Node | None, Node | None]]:
    """What the run learns beside what flows through it, row by row."""
    return list(zip_longest(learning_lines(snapshot), flow_lines(snapshot)))


def _columns(rows: Sequence[tuple[Node | None, Node | None]]) -> RenderableType:
    columns = Table.grid(padding=(0, 2))
    learning = [node for node, _ in rows if node is not None]
    flow = [node for _, node in rows if node is not None]
    if not flow:
        return lines_table(learning, grid="left")
    columns.add_row(lines_table(learning, grid="left"), lines_table(flow, grid="right"))
    return columns


def _process_rows(rows: Sequence[Node]) -> RenderableType:
    return rows_table(Node("", unit="table", children=tuple(rows)), has_edges=False)


def _progress(snapshot: RunSnapshot) -> RenderableType:
    done = snapshot.version
    steps = snapshot.steps
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(steps, done, width=40)
    row.add_row(Text(f"step {done}/{steps}", "bold"), bar, Text("  ".join(pace(snapshot))))
    return row


def pace(snapshot: RunSnapshot) -> list[str]:
    """How much of the run is done, what a step takes, and how long the rest will take, as far as known."""
    words = [f"{snapshot.version / snapshot.steps:.0%}"]
    if snapshot.step_s is not None:
        words.append(f"{few_digits(snapshot.step_s, 2)} s a step")
    if snapshot.eta_s and snapshot.version < snapshot.steps and snapshot.status not in OVER:
        words.append(f"{duration(snapshot.eta_s)} left")
    return words


def learning_lines(snapshot: RunSnapshot) -> Iterator[Node]:
    reward = snapshot.metric("reward")
    curve = sparkline(snapshot.curve("reward"))
    yield Node("reward", None if reward is None else f"{reward:.3f}  {curve}", style="bold cyan")
    yield from _evaluation_lines(snapshot)
    yield _staleness_line(snapshot)
    rate = snapshot.tokens_per_s
    yield Node("tokens/s", None if rate is None else f"{rate:,.0f}")
    for label, name, form in (
        ("length", "completions/mean_length", ",.1f"),
        ("turns", "sessions/mean_turns", ",.1f"),
        ("environment", "sessions/environment_tokens_share", ".0%"),
        ("cut off", "completions/clipped_ratio", ".1%"),
        ("entropy", "entropy", ".3f"),
        ("grad norm", "grad_norm", ".3g"),
        ("MFU", "perf/mfu", ".1%"),
        ("tokens/s/rank", "perf/tokens_per_s_per_rank", ",.0f"),
        ("passes filled", "forward/fill", ".0%"),
        ("peak GiB", "perf/peak_gib", ".1f"),
    ):
        value = snapshot.metric(name)
        if value is not None:
            yield Node(label, f"{value:{form}}")
    failed = snapshot.metric("scores/failed_ratio")
    if failed:
        yield Node("failed scores", f"{failed:.1%} of the last step", style="red")
    replaced = sum(snapshot.curve("groups_dropped"))
    if replaced:
        last = snapshot.metric("groups_dropped") or 0.0
        yield Node("replaced", f"{replaced:,.0f} groups, {last:,.0f} in the last step", style="yellow")


def _evaluation_lines(snapshot: RunSnapshot) -> Iterator[Node]:
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for item in snapshot.evaluations:
        by_set.setdefault(str(item.get("set")), []).append(item)
    if not by_set:
        yield Node("evaluation")
    for name, items in by_set.items():
        values = [item.get("score") for item in items]
        scores = [score for score in values if isinstance(score, int | float) and score == score]
        more = f"  first {scores[0]:.3f}, best {max(scores):.3f}" if len(scores) > 1 else ""
        # Without its reason, which is too long for a column: `failure_lines` has it.
        newest = score_text({**items[-1], REASON: ""})
        style = "bold red" if newest.startswith("all failed") else "bold"
        yield Node(f"eval {name}", newest + more, style=style)


def _staleness_line(snapshot: RunSnapshot) -> Node:
    seen = snapshot.curve("staleness/max")
    mean = snapshot.metric("staleness/mean")
    bound = f"(bound {snapshot.max_staleness})"
    if not seen:
        return Node("staleness", f"{NOTHING} {bound}")
    mean_words = "" if mean is None else f"  mean {mean:.2f}"
    style = "" if max(seen) <= snapshot.max_staleness else "bold red"
    return Node("staleness", f"max {max(seen):.0f}{mean_words}  {bound}", style=style)


def flow_lines(snapshot: RunSnapshot) -> Iterator[Node]:
    """What waits, is held and has failed between the services."""
    alive = [beat.counts for beat in snapshot.workers if beat.is_alive]
    for queue in snapshot.queues:
        if queue.name == "scores":
            continue
        waiting, held = QUEUE_WORDS.get(queue.name, (f"{queue.name} waiting", "held"))
        if queue.waiting is not None:
            yield Node(waiting, f"{queue.waiting:,}")
        yield Node(f"  {held} now", f"{queue.held:,}")
    for label, name in (("groups outstanding", "outstanding"), ("groups ready to train", "complete")):
        counts = [gauges[name] for gauges in alive if name in gauges]
        if counts:
            yield Node(label, f"{sum(counts):,.0f}")
    if snapshot.status in OVER and not snapshot.queues:  # read from the run's folder: its Redis is gone
        return
    yield Node("entries in the streams", f"{sum(queue.length for queue in snapshot.queues):,}")
    style = "bold red" if snapshot.num_dead else ""
    yield Node(
        "dead letters", f"{snapshot.num_dead:,}", style=style, link="dead" if snapshot.num_dead else ""
    )
    for queue_name, states in snapshot.jobs.items():
        words = {"queued": "waiting", "started": "busy", "failed": "failed"}
        counts_text = ", ".join(
            f"{states[state]:,} {word}" for state, word in words.items() if state in states
        )
        style = "bold red" if "failed" in states else ""
        yield Node(f"jobs, {queue_name}", counts_text, style=style)
    failures: dict[str, float] = {}
    """How often each failed, over all workers."""
    for beat in snapshot.workers:
        for name, count in beat.counts.items():
            if name.startswith(FAILURES):
                failures[name] = failures.get(name, 0) + count
    for name, count in sorted(failures.items()):
        reward, _, kind = name.removeprefix(FAILURES).rpartition(":")
        yield Node(f"failed: {reward} ({kind})", f"{count:,.0f}", style="red")
    yield from _weights_lines(alive)
    wrong = sum(beat.counts.get("weight_mismatches", 0) for beat in snapshot.workers)
    if wrong:
        yield Node("engines with wrong weights", f"{wrong:,.0f} times, repaired", style="bold red")
    for role in ("trainer", "rollout"):
        yield Node(f"{role} idle", snapshot.idle_share(role), "share")


def _weights_lines(alive: Sequence[Mapping[str, float]]) -> Iterator[Node]:
    """What the newest version and checkpoint took to write, and the slowest engine to take in the version."""
    for gauges in alive:
        if "weights_bytes" in gauges:
            changed = gauges.get("weights_changed", -1.0)
            share = f", {changed:.1%} changed" if changed >= 0.0 else ""
            yield Node("weights written", f"{size(gauges['weights_bytes'])}{share}")
            yield Node("  beside training", gauges.get("weights_encode_s", 0.0), "s")
        if "checkpoint_copy_s" in gauges:
            yield Node("checkpoint copied in", gauges["checkpoint_copy_s"], "s")
            yield Node("  after a wait of", gauges.get("checkpoint_wait_s"), "s")
            yield Node("  written beside in", gauges.get("checkpoint_write_s"), "s")
    for name, label in (("weights_load_s", "weights staged in"), ("weights_pause_s", "  engine's pause")):
        seconds = [gauges[name] for gauges in alive if name in gauges]
        if seconds:
            yield Node(label, max(seconds), "s")


def process_table(
    snapshot: RunSnapshot,
    services: Mapping[str, ServiceStatus] | None = None,
    without: Collection[str] = (),
) -> Node:
    """A row for each process; of those in `without` the details are said elsewhere."""
    services = services or {}
    is_full = snapshot.memory.is_full
    beats = {
        beat.name: replace(beat, detail="") if beat.name in without else beat for beat in snapshot.workers
    }
    rows = (
        {"process": name} | _process_row(beats.get(name), services.get(name), is_full)
        for name in dict.fromkeys([*services, *beats])
    )
    return table(rows, {"idle": "share"})


def state_text(beat: Heartbeat) -> str:
    """What a process does, in words."""
    state = beat.state.replace("_", " ")
    return f"waits for {state.removeprefix(WAIT)}" if state.startswith(WAIT) else state


def _process_row(
    beat: Heartbeat | None, service: ServiceStatus | None, is_redis_full: bool
) -> dict[str, Any]:
    """What a process does, by its heartbeat and by the supervisor that started it."""
    count = service.restarts if service else 0
    restarts = {0: "", 1: "restarted once"}.get(count, f"restarted {count} times")
    is_own = service is None or (beat is not None and beat.pid == service.pid)
    state = ""
    style = "yellow"
    if service is not None and service.state != "running":
        state = service.state
    elif beat is None or not is_own:
        state = "starting"
    elif not beat.is_alive and is_redis_full:
        state = "cannot report: Redis is full"
    elif not beat.is_alive:
        state = f"silent for {duration(max(0.0, beat.age_s))}"
        style = "bold red"
    if state or beat is None:
        return {
            "state": Node("state", state, style=style),
            "version": None,
            "idle": None,
            "what for": restarts,
        }
    state = state_text(beat)
    style = "yellow" if beat.state.startswith(WAIT) else "green"
    damaged = beat.counts.get(DAMAGED_VERSION)
    unusable = "" if damaged is None else f"weights of version {damaged:g} are damaged"
    return {
        "state": Node("state", state, style=style),
        "version": beat.version if beat.version >= 0 else None,
        "idle": beat.idle_share,
        "what for": "; ".join(text for text in (unusable, beat.detail, restarts) if text),
    }


def _warnings(snapshot: RunSnapshot, folder: RunFolder) -> Iterator[Text]:
    """The newest warnings that hold; all of them are in the run's state and in the trainer's log."""
    held = snapshot.warnings
    lines = [warning_line(item) for item in held[-MAX_WARNINGS:]]
    older = len(held) - len(lines)
    if older:
        more = folder.command("status", "--json")
        lines.append(f"and {plural(older, 'older warning')}: {more}")
    lines += snapshot.config_warnings
    lines += [f"{name}: {detail}" for name, detail in snapshot.blocked.items()]
    starved = starved_line(snapshot)
    if starved:
        lines.append(starved)
    for line in lines:
        yield Text.assemble(("warning  ", "bold yellow"), printable(line))


def failure_lines(snapshot: RunSnapshot) -> list[str]:
    """What fails and why, the most frequent cause first; then evaluations of which samples failed."""
    newest = {str(item.get("set")): item for item in snapshot.evaluations}
    evaluations = [evaluation_line(item) for item in newest.values() if item.get(REASON)]
    return [failure.in_words for failure in snapshot.failures] + evaluations


def failure_line(failure: Failure) -> str:
    """One line about the failed attempts of one cause, with the reason of the last one."""
    return f"failing: {failure.in_words}"


def starved_line(snapshot: RunSnapshot) -> str:
    """Which processes were short of CPU, in one line; empty where none was."""
    beats = [beat for beat in snapshot.workers if beat.is_alive and beat.counts.get(STARVED)]
    if not beats:
        return ""
    longest_s = max(beat.counts.get(STARVED_S, 0.0) for beat in beats)
    times = sum(beat.counts[STARVED] for beat in beats)
    names = ", ".join(beat.name for beat in beats)
    how_often = "once" if times == 1 else f"{times:,.0f} times"
    return (
        f"short of CPU: {names} had to wait for a core {how_often}, up to {longest_s:.1f} s. Run "
        "fewer processes on this machine, or give it more cores"
    )


def _urgency(row: Node) -> int:
    """Of a process, for `Section.urgency`: first those that do not work, then those that wait or leave."""
    style = next(cell.style for cell in row.children if cell.label == "state")
    return {"bold red": 2, "yellow": 1}.get(style, 0)


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The course of `values` in `width` characters: each the mean of its part, from lowest to highest."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for column in range(width):
        chunk = finite[column * len(finite) // width : (column + 1) * len(finite) // width]
        means.append(sum(chunk) / len(chunk))
    low = min(means)
    span = max(means) - min(means)
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5) if span else 0] for mean in means)


def step_line(snapshot: RunSnapshot, index: int = -1) -> str:
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
    failed = metrics.get("scores/failed_ratio")
    if failed:
        parts.append(f"{failed:.0%} of the scores failed")
    replaced = metrics.get("groups_dropped")
    if replaced:
        parts.append(f"{replaced:.0f} groups replaced")
    return "  ".join(parts)


def evaluation_line(evaluation: Mapping[str, object]) -> str:
    scores = score_text(evaluation)
    return f"evaluation of version {evaluation.get('version')} on {evaluation.get('set')}: {scores}"


def warning_line(warning: Mapping[str, object]) -> str:
    """One warning of the trainer's diagnostics as one line of plain text; or that it is over."""
    until = warning.get("until_step")
    metric = warning.get("metric")
    if isinstance(until, int):
        return f"healthy again since step {until + 1}: {metric}"
    since = warning.get("since_step")
    begun = f" (since step {since + 1})" if isinstance(since, int) else ""
    return f"{warning.get('text')}{begun}. {warning.get('advice')}"


def score_text(evaluation: Mapping[str, object]) -> str:
    """The score of an evaluation, and how many samples have none: a failure is never a zero."""
    score = evaluation.get("score")
    num_failed = evaluation.get("num_failed")
    num_failed = num_failed if isinstance(num_failed, int | float) else 0
    failed = f"{num_failed:,.0f}" if num_failed else ""
    reason = f": {evaluation[REASON]}" if evaluation.get(REASON) else ""
    if not isinstance(score, int | float) or score != score:
        return (f"all failed ({failed} samples)" if failed else "all failed") + reason
    if not failed:
        return f"{score:.3f}"
    num_scored = evaluation.get("num_samples")
    if not isinstance(num_scored, int | float):
        return f"{score:.3f} ({failed} failed{reason})"
    total = num_scored + num_failed
    return f"{score:.3f} of {num_scored:,.0f} of {total:,.0f} samples; {failed} failed{reason}"
