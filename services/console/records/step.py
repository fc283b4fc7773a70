"""What a step was made of, for people. Pure functions of what was gathered."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, StreamName
from tidemill.common.history.groups import advantages_of, dropped_groups, left_out
from tidemill.common.history.records import STAGES, SampleFacts, StepRecord, ends, read_step
from tidemill.common.history.sessions import SessionFacts
from tidemill.common.process.activity import times_of
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Commit
from tidemill.services.console.options import ViewOptions
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.formats import NOTHING, number, printable, took, when
from tidemill.services.console.text.tables import (
    Line,
    jsonable,
    listing,
    plain_fields,
    print_lines,
    terminal,
)

MAX_GROUPS = 40
"""Groups that are shown unless all are asked for."""
MAX_DROPPED = 12
BAR_WIDTH = 24
OUTCOMES = (
    "reward", "reward_std", "loss", "grad_norm", "learning_rate", "entropy", "kl", "rollout_kl",
    "clip_ratio/region_mean", "logprob_gap/mean", "frac_reward_zero_std", "completions/mean_length",
    "completions/clipped_ratio", "update_skipped", "teacher_kl",
)  # fmt: skip
"""Metrics that are shown, of those that the step has; the commit has all."""


def print_step(console: Console, trace: StepRecord, is_full: bool) -> None:
    """What went in, how it was split up, where the time went, what came out."""
    commit = trace.commit
    head = f"step {commit.step}  version {commit.step} → {commit.version}"
    console.print(Text(head, "bold"), soft_wrap=True)
    print_lines(console, [("begun", f"{when(commit.started_at)}, {took(_wall_s(trace))}")])
    console.print(Text("\nwhat went in", "bold"))
    print_lines(console, _input_lines(trace))
    console.print(_groups_table(trace, is_full))
    for ticket in trace.reversed_groups:
        words = f"  ticket {ticket}: its advantages fall where its rewards rise; see tidemill trace {ticket}"
        console.print(Text(words, "bold red"), soft_wrap=True)
    if len(commit.groups) > MAX_GROUPS and not is_full:
        more = len(commit.groups) - MAX_GROUPS
        console.print(Text(f"  … {more:,} more groups; --full shows all", "dim"))
    passes = f", {commit.passes} times over" if commit.passes > 1 else ""
    console.print(Text(f"\nin which micro-batches{passes}", "bold"))
    console.print(_batches_table(trace))
    console.print(Text("\nwhere the time went", "bold"))
    console.print(_times_table(trace))
    console.print(_stages_table(trace))
    print_lines(console, _slowest_lines(trace))
    console.print(Text("\nwhat came out", "bold"))
    print_lines(console, _output_lines(trace))


def _wall_s(trace: StepRecord) -> float:
    return trace.commit.finished_at - trace.commit.started_at


def _input_lines(trace: StepRecord) -> Iterator[Line]:
    commit, rewards = trace.commit, trace.rewards
    num_trained = len(set(commit.trained_keys))
    made = [s.num_tokens for s in trace.samples.values()]
    yield "groups", f"{len(commit.groups)}, of which {num_trained:,} samples were trained on"
    if trace.num_lost:
        yield "gone", f"{trace.num_lost:,} of them: the streams have their trajectories no more"
    if made:
        yield "tokens", f"{sum(made):,} of completions, {min(made)} to {max(made)} each"
    yield from _session_lines([s.session for s in trace.samples.values() if s.session])
    if rewards:
        spread = f"{np.mean(rewards):.4g} ± {np.std(rewards):.4g}, {min(rewards):.4g} to {max(rewards):.4g}"
        yield "rewards", f"mean {spread}"
    if shares := _staleness_words(trace):
        yield "staleness", shares
    for reason, tickets in _by_reason(dropped_groups(trace.commit)).items():
        yield "dropped", f"{reason}: {_listed(tickets, 'group')}"
    for reason, samples in _by_reason([(f"{t}.{i}", why) for t, i, why in left_out(trace.commit)]).items():
        yield "left out", f"{reason}: {_listed(samples, 'sample')}"


def _session_lines(sessions: Sequence[SessionFacts]) -> Iterator[Line]:
    """What only sessions have; nothing for single turns."""
    if not sessions:
        return
    turns = [len(session.turns) for session in sessions]
    yield "turns", f"mean {np.mean(turns):.3g}, {min(turns)} to {max(turns)} a session"
    answered = sum(session.num_environment_tokens for session in sessions)
    made = sum(turn.num_tokens for session in sessions for turn in session.turns)
    yield "origin", f"{made:,} tokens of the model, {answered:,} of the environment"
    engine_s, environment_s = (sum(getattr(s, n) for s in sessions) for n in ("engine_s", "environment_s"))
    yield (
        "waited",
        f"{took(engine_s)} for the engine, {took(environment_s)} for the environment, all sessions",
    )
    ends = Counter(session.end for session in sessions if session.end != "done")
    if ends:
        yield "truncated", ", ".join(f"{count} by {end}" for end, count in sorted(ends.items()))
    for name, count in (("forks", "num_forks"), ("faults", "num_faults")):
        if number_of := sum(getattr(session, count) for session in sessions):
            yield name, f"{number_of:,} in {sum(getattr(s, count) > 0 for s in sessions)} sessions"


def _staleness_words(trace: StepRecord) -> str:
    metrics, found = trace.commit.metrics, []
    for age in range(64):
        if (share := metrics.get(f"staleness/share_{age}")) is None:
            break
        if share:
            found.append(f"{age}: {share:.0%}")
    if not found and (most := metrics.get("staleness/max")) is not None:
        return f"at most {most:g}, mean {metrics.get('staleness/mean', 0.0):.2g}"
    return f"of tokens, in steps  {'  '.join(found)}" if found else ""


def _by_reason(drops: Sequence[tuple[object, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for what, reason in drops:
        found.setdefault(printable(reason, 60), []).append(str(what))
    return found


def _listed(names: Sequence[str], noun: str) -> str:
    shown = ", ".join(names[:MAX_DROPPED]) + (", …" if len(names) > MAX_DROPPED else "")
    return f"{len(names)} {noun}{'s' * (len(names) != 1)} ({shown})"


def _groups_table(trace: StepRecord, is_full: bool) -> Table:
    titles = ("ticket", "samples", "rewards", "mean", "advantages", "versions", "tokens", "complete", "by")
    table = listing(titles, ("ticket", "samples", "mean", "tokens", "complete"), ("by",))
    commit = trace.commit
    for ticket in commit.groups if is_full else commit.groups[:MAX_GROUPS]:
        samples = trace.group(ticket)
        rewards = [s.reward for s in samples if s.reward is not None]
        advantages = advantages_of(commit, ticket).values()
        complete_s = trace.complete_at(ticket) - commit.started_at if samples else None
        table.add_row(
            str(ticket),
            str(len(samples)),
            Text(_counted(rewards)),
            number(float(np.mean(rewards)) if rewards else None),
            f"{min(advantages):.3g} … {max(advantages):.3g}" if advantages else NOTHING,
            _versions(samples),
            f"{sum(s.num_tokens for s in samples):,}",
            _relative(complete_s),
            Text(printable(", ".join(sorted({s.worker for s in samples})), 60)),
        )
    return table


def _counted(rewards: Sequence[float]) -> str:
    """Few different rewards with their counts, many with their range."""
    counts = Counter(rewards)
    if not counts:
        return NOTHING
    if len(counts) <= 3:
        return "  ".join(f"{count}× {value:.4g}" for value, count in sorted(counts.items()))
    return f"{min(counts):.4g} … {max(counts):.4g}"


def _versions(samples: Sequence[SampleFacts]) -> str:
    found = [version for sample in samples for version in sample.versions]
    if not found:
        return NOTHING
    return str(min(found)) if min(found) == max(found) else f"{min(found)} … {max(found)}"


def _relative(seconds: float | None) -> str:
    """Before or after the step began."""
    if seconds is None:
        return NOTHING
    return f"{took(-seconds)} before" if seconds < 0 else f"{took(seconds)} after"


def _batches_table(trace: StepRecord) -> Table:
    titles = ("mini-batch", "micro-batch", "samples", "groups", "prompt tokens", "completion tokens")
    table = listing(titles, titles)
    for batch in trace.micro_batches():
        table.add_row(
            str(batch.mini_batch),
            str(batch.micro_batch),
            str(len(batch.keys)),
            str(len({ticket for ticket, _ in batch.keys})),
            f"{batch.num_prompt_tokens:,}",
            f"{batch.num_tokens:,}",
        )
    return table


def _times_table(trace: StepRecord) -> Table:
    """The trainer's own time by what it did, most first."""
    spent = times_of(trace.commit.metrics)
    total_s = sum(spent.values())
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        share = seconds / total_s if total_s else 0.0
        table.add_row(
            f"trainer: {name.replace(':', ' ')}",
            took(seconds),
            f"{share:.0%}",
            "█" * round(BAR_WIDTH * share),
        )
    return table


def _stages_table(trace: StepRecord) -> Table:
    """What the samples went through, one after the other."""
    table = listing(("the samples", "median", "90 %", "longest", "by"), ("median", "90 %", "longest"))
    stages = {key: s.stages_s(trace.commit.finished_at) for key, s in trace.samples.items()}
    for stage in STAGES:
        spent = {key: found[stage] for key, found in stages.items() if stage in found}
        if not spent:
            continue
        ticket, index = longest = max(spent, key=lambda key: spent[key])
        values = np.array(list(spent.values()))
        middle, high = np.percentile(values, [50, 90])
        table.add_row(stage, took(middle), took(high), took(spent[longest]), f"{ticket}.{index}")
    return table


def _slowest_lines(trace: StepRecord) -> Iterator[Line]:
    commit, last = trace.commit, trace.last_to_come
    if last is None:
        return
    ready = sum(1 for ticket in commit.groups if trace.complete_at(ticket) <= commit.started_at)
    yield "ready", f"{ready} of {len(commit.groups)} groups were complete when the step began"
    spent = last.stages_s(commit.finished_at)
    words = ", ".join(f"{stage} {took(spent[stage])}" for stage in STAGES[:-1] if stage in spent)
    came = _relative(last.scored_at - commit.started_at)
    yield "last to come", f"{last.key[0]}.{last.key[1]}, {came} the step began: {words}"
    if trace.manifest is not None and trace.manifest.announced_at:
        late_s = trace.manifest.announced_at - commit.finished_at
        yield "weights", f"announced {took(max(0.0, late_s))} after the commit"


def _output_lines(trace: StepRecord) -> Iterator[Line]:
    metrics = trace.commit.metrics
    for name in (*OUTCOMES, *(name for name in sorted(metrics) if name.startswith("teacher/"))):
        if name in metrics:
            yield name, number(metrics[name])
    yield "version", str(trace.commit.version)
    yield "digest", trace.commit.digest or NOTHING
    yield "more", f"tidemill streams show commits {trace.commit.step} has every metric"


def step_tree(record: StepRecord) -> dict[str, Any]:
    commit = record.commit
    return {
        "commit": jsonable(plain_fields(commit)),
        "groups": [_group_tree(record, ticket) for ticket in commit.groups],
        "micro_batches": [jsonable(asdict(batch)) for batch in record.micro_batches()],
        "dropped": [{"ticket": t, "reason": reason} for t, reason in dropped_groups(commit)],
        "left_out": [{"ticket": t, "index": i, "reason": reason} for t, i, reason in left_out(commit)],
        "reversed_groups": record.reversed_groups,
        "weights": jsonable(plain_fields(record.manifest)) if record.manifest else None,
    }


def _group_tree(record: StepRecord, ticket: int) -> dict[str, Any]:
    trained_at = record.commit.finished_at
    return {
        "ticket": ticket,
        "complete_at": record.complete_at(ticket),
        "advantages": advantages_of(record.commit, ticket),
        "samples": [jsonable(asdict(s)) | {"stages_s": s.stages_s(trained_at)} for s in record.group(ticket)],
    }


def show_step(view: ViewOptions, step: int) -> None:
    """What went into a step, where its time went, and what came out.

    Raises:
        ConfigError: the run has no commit of it.
    """

    async def look() -> None:
        async with open_history(view.run_id, view.runs_dir) as access:
            trace = await read_step(access.history, step)
            if trace is None:
                raise ConfigError(await _absence(access.history, step))
        if view.as_json:
            print(json.dumps(step_tree(trace)))
        else:
            print_step(terminal(), trace, view.is_full)

    run_main(look())


async def _absence(history: History, step: int) -> str:
    known = [
        message.step for message in await ends(history, StreamName.COMMITS) if isinstance(message, Commit)
    ]
    there = f"it has steps {known[0]} to {known[-1]}, counted from 0" if known else "it has none yet"
    return f"run {history.run_id} has no commit of step {step}: {there}."
