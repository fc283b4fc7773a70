"""`tidemill step`: what went into a step, in which micro-batches, where its time went, and what came out."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from tidemill.common.command_line import command_line
from tidemill.common.errors import ConfigError
from tidemill.common.history import StreamName
from tidemill.common.history.groups import advantages_of, dropped_groups, left_out
from tidemill.common.process.activity import times_of
from tidemill.common.run.state import PROFILES
from tidemill.common.streams import id_order, last_id
from tidemill.common.wire.messages import Commit, is_demonstration
from tidemill.services.console.commands import StepOptions
from tidemill.services.console.look.joins import STAGES, StepRecord, read_step
from tidemill.services.console.look.selection import parse_steps, span_of
from tidemill.services.console.look.sessions import SessionFacts
from tidemill.services.console.look.timeline import write_timeline
from tidemill.services.console.run.folder import RunFolder, nearest
from tidemill.services.console.run.history import RunAccess, read_run
from tidemill.services.console.text.formats import NOTHING, plural, sample_name, took, when
from tidemill.services.console.text.tree import Node, jsonable, note, part, show, table

MAX_GROUPS = 40
"""Groups that are shown unless all are asked for."""
MAX_DROPPED = 12
"""Names that are listed for each reason why groups or samples were not trained."""
BAR_WIDTH = 24
OUTCOMES = (
    "reward", "reward_std", "loss", "grad_norm", "learning_rate", "entropy", "kl", "rollout_kl",
    "clip_ratio/region_mean", "logprob_gap/mean", "logprob_gap/unmasked_mean", "routes/logprob_gap_with",
    "routes/logprob_gap_without", "routes/changed_tokens", "routes/changed_layers", "frac_reward_zero_std",
    "completions/mean_length", "completions/clipped_ratio", "update_skipped", "teacher_kl",
)  # fmt: skip
"""Metrics that are shown, of those that the step has; the commit has all."""


REVERSAL = "its advantages fall where its rewards rise"


def step_tree(record: StepRecord, is_full: bool = False, run: RunFolder | None = None) -> Node:
    commit = record.commit
    took_s = commit.finished_at - commit.started_at
    command = command_line if run is None else run.command
    tickets = commit.groups if is_full else commit.groups[:MAX_GROUPS]
    more = len(commit.groups) - len(tickets)
    passes = f", {commit.passes} times over" if commit.passes > 1 else ""
    return part(
        f"step {commit.step}  version {commit.step} → {commit.version}",
        Node("begun", f"{when(commit.started_at)}, {took(took_s)}"),
        part(
            "what went in",
            _input_lines(record),
            table(_group_row(record, ticket) for ticket in tickets),
            (
                note(f"ticket {ticket}: {REVERSAL}; see {command('trace', str(ticket))}", "bold red")
                for ticket in record.reversed_groups
            ),
            [note(f"… {more:,} more groups; --full shows all", "dim")] if more else [],
        ),
        part(f"in which micro-batches{passes}", batch_table(record)),
        part(
            "where the time went",
            time_table(commit.metrics),
            table(_stage_rows(record), {"median": "s", "90 %": "s", "longest": "s"}),
            _slowest_lines(record),
        ),
        part(
            "what came out",
            outcome_lines(commit.metrics),
            Node("version", commit.version),
            Node("digest", commit.digest),
            Node("more", f"{command('streams', 'show', 'commits', str(commit.step))} has every metric"),
        ),
    )


def batch_table(record: StepRecord, has_room: bool = False) -> Node:
    """The micro-batches of a step, with their samples where there is room; tokens are counted where the
    samples are known."""
    rows = []
    for batch in record.micro_batches():
        tickets = {ticket for ticket, _ in batch.keys}
        names = " ".join(sample_name(*key) for key in batch.keys)
        row = {
            "mini-batch": batch.mini_batch,
            "micro-batch": batch.micro_batch,
            "groups": len(tickets),
            "prompt tokens": batch.num_prompt_tokens or None,
            "completion tokens": batch.num_tokens or None,
            "samples": len(batch.keys),
            "": names if has_room else None,
        }
        rows.append(row)
    return table(rows)


def _input_lines(record: StepRecord) -> Iterator[Node]:
    commit = record.commit
    rewards = record.rewards
    num_trained = len(set(commit.trained_keys))
    lengths = [sample.num_tokens for sample in record.samples.values()]
    yield Node("groups", f"{len(commit.groups)}, with {num_trained:,} samples that were trained on")
    if record.num_lost:
        yield Node("gone", f"{record.num_lost:,} of these samples: the streams no longer have them")
    if lengths:
        yield Node("tokens", f"{sum(lengths):,} of completions, {min(lengths)} to {max(lengths)} each")
    yield from _session_lines([sample.session for sample in record.samples.values() if sample.session])
    if rewards:
        spread = f"{np.mean(rewards):.4g} ± {np.std(rewards):.4g}, {min(rewards):.4g} to {max(rewards):.4g}"
        yield Node("rewards", f"mean {spread}")
    shares = _staleness_words(commit)
    if shares:
        yield Node("staleness", shares)
    yield from _drop_lines("dropped", "group", dropped_groups(commit))
    samples = [(sample_name(ticket, index), reason) for ticket, index, reason in left_out(commit)]
    yield from _drop_lines("left out", "sample", samples)


def _drop_lines(label: str, noun: str, drops: Iterable[tuple[int | str, str]]) -> Iterator[Node]:
    """One line for each reason: `zero_variance: 2 groups (2, 5)`. `drops` are pairs of name and reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in drops:
        by_reason.setdefault(reason, []).append(str(name))
    for reason, names in by_reason.items():
        listed = ", ".join(names[:MAX_DROPPED])
        if len(names) > MAX_DROPPED:
            listed += ", …"
        yield Node(label, f"{reason}: {plural(len(names), noun)} ({listed})")


def _session_lines(sessions: Sequence[SessionFacts]) -> Iterator[Node]:
    """What only sessions have; nothing for single turns."""
    if not sessions:
        return
    turns = [len(session.turns) for session in sessions]
    yield Node("turns", f"mean {np.mean(turns):.3g}, {min(turns)} to {max(turns)} a session")
    answered = sum(session.num_environment_tokens for session in sessions)
    generated = sum(turn.num_tokens for session in sessions for turn in session.turns)
    yield Node("origin", f"{generated:,} tokens of the model, {answered:,} of the environment")
    engine = took(sum(session.engine_s for session in sessions))
    environment = took(sum(session.environment_s for session in sessions))
    yield Node("waited", f"{engine} for the engine, {environment} for the environment, all sessions")
    ends = Counter(session.end for session in sessions if session.end != "done")
    if ends:
        yield Node("truncated", ", ".join(f"{times} by {end}" for end, times in sorted(ends.items())))
    for label, name in (("forks", "num_forks"), ("faults", "num_faults")):
        counts = [getattr(session, name) for session in sessions]
        if any(counts):
            yield Node(label, f"{sum(counts):,} in {sum(number > 0 for number in counts)} sessions")


def _staleness_words(commit: Commit) -> str:
    """Shares of tokens by staleness in steps, such as `0: 80%  2: 20%`; of a commit that has no shares, the
    greatest and the mean."""
    metrics = commit.metrics
    shares = []
    for age in count():
        share = metrics.get(f"staleness/share_{age}")
        # Shares are without gaps, from 0 to the oldest token's: the first one that is absent ends them.
        if share is None:
            break
        if share:
            shares.append(f"{age}: {share:.0%}")
    if shares:
        return f"of tokens, in steps  {'  '.join(shares)}"
    if "staleness/max" in metrics:
        return f"at most {metrics['staleness/max']:g}, mean {metrics.get('staleness/mean', 0.0):.2g}"
    return ""


def _group_row(record: StepRecord, ticket: int) -> dict[str, Any]:
    samples = record.group(ticket)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    advantages = advantages_of(record.commit, ticket).values()
    versions = {version for sample in samples for version in sample.versions}
    if is_demonstration(ticket):  # whose version is a placeholder
        versions = set()
    return {
        "ticket": ticket,
        "samples": len(samples),
        "rewards": _rewards_words(rewards),
        "mean": float(np.mean(rewards)) if rewards else None,
        "advantages": f"{min(advantages):.3g} … {max(advantages):.3g}" if advantages else None,
        "versions": _range_words(versions),
        "tokens": sum(sample.num_tokens for sample in samples),
        "complete": _relative(record, record.complete_at(ticket)),
        "by": ", ".join(sorted({sample.worker for sample in samples})),
    }


def _rewards_words(rewards: Sequence[float]) -> str:
    """Up to three different rewards with their counts, `2× 0  1× 1`; of more, the lowest and the highest."""
    counts = sorted(Counter(rewards).items())
    if len(counts) <= 3:
        return "  ".join(f"{times}× {value:.4g}" for value, times in counts)
    return f"{counts[0][0]:.4g} … {counts[-1][0]:.4g}"


def _range_words(versions: Collection[int]) -> str:
    """`3 … 5`, or `3` where all are the same."""
    if len(versions) <= 1:
        return "".join(map(str, versions))
    return f"{min(versions)} … {max(versions)}"


def _relative(record: StepRecord, at_s: float) -> str:
    """A time relative to the beginning of the step, `2.0 s before`. Times that are not known are 0."""
    began_at = record.commit.started_at
    if not at_s or not began_at:
        return NOTHING
    seconds = at_s - began_at
    return f"{took(-seconds)} before" if seconds < 0 else f"{took(seconds)} after"


def time_table(metrics: Mapping[str, float]) -> Node:
    """The trainer's own time by what it did, most first."""
    spent = times_of(metrics)
    rest_s = metrics.get("step_time_s", 0.0) - sum(spent.values())
    if rest_s > 0:
        spent["waiting and all else"] = rest_s
    total_s = sum(spent.values()) or 1.0
    return table(
        {
            "trainer": name.replace(":", " "),
            "time": Node("time", seconds, "s"),
            "share": Node("share", seconds / total_s, "share"),
            " ": "█" * round(BAR_WIDTH * seconds / total_s),
        }
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
    )


def _stage_rows(record: StepRecord) -> Iterator[dict[str, Any]]:
    stages = {key: sample.stages_s(record.commit.finished_at) for key, sample in record.samples.items()}
    for stage in STAGES:
        spent = {key: durations[stage] for key, durations in stages.items() if stage in durations}
        if spent:
            longest = max(spent, key=lambda key: spent[key])
            middle, high = np.percentile(list(spent.values()), [50, 90])
            yield {
                "the samples": stage,
                "median": float(middle),
                "90 %": float(high),
                "longest": spent[longest],
                "by": sample_name(*longest),
            }


def _slowest_lines(record: StepRecord) -> Iterator[Node]:
    commit = record.commit
    # A time of 0 is not known: demonstrations have no scores, and commits of older releases no times.
    scored = [sample for sample in record.samples.values() if sample.scored_at]
    if scored and commit.started_at:
        scored_tickets = {sample.key[0] for sample in scored}
        num_ready = sum(record.complete_at(ticket) <= commit.started_at for ticket in scored_tickets)
        of_groups = f"of {len(scored_tickets)} groups with scores"
        yield Node("ready", f"{num_ready} {of_groups} were complete when the step began")
        last = max(scored, key=lambda sample: sample.scored_at)
        spent = last.stages_s(commit.finished_at)
        # Without the last stage, which it spent in the trainer.
        words = ", ".join(f"{stage} {took(spent[stage])}" for stage in STAGES[:-1] if stage in spent)
        came = _relative(record, last.scored_at)
        yield Node("last to come", f"{sample_name(*last.key)}, {came} the step began: {words}")
    if record.manifest is not None and record.manifest.announced_at and commit.finished_at:
        late_s = max(0.0, record.manifest.announced_at - commit.finished_at)
        yield Node("weights", f"announced {took(late_s)} after the commit")


def outcome_lines(metrics: Mapping[str, float]) -> Iterator[Node]:
    """The numbers of a step that people look at first."""
    teachers = (name for name in sorted(metrics) if name.startswith("teacher/"))
    return (Node(name, metrics[name]) for name in (*OUTCOMES, *teachers) if name in metrics)


def step_json(record: StepRecord) -> dict[str, Any]:
    commit = record.commit
    groups = []
    for ticket in commit.groups:
        samples = [
            jsonable(sample) | {"stages_s": sample.stages_s(commit.finished_at)}
            for sample in record.group(ticket)
        ]
        group = {
            "ticket": ticket,
            "complete_at": record.complete_at(ticket),
            "advantages": advantages_of(commit, ticket),
            "samples": samples,
        }
        groups.append(group)
    return {
        "commit": commit,
        "groups": groups,
        "micro_batches": list(record.micro_batches()),
        "reversed_groups": record.reversed_groups,
        "weights": record.manifest,
    }


def show_step(options: StepOptions) -> None:
    if options.profile:
        print(read_run(options, lambda access: _request_profile(access, options.steps)))
        return
    first, last = parse_steps(options.steps)
    if options.output is not None:
        return write_timeline(options, options.output, first, last)
    if first < last:
        raise ConfigError(
            f"steps {options.steps} are several, which only a timeline shows: add -o trace.json"
        )

    async def read(access: RunAccess) -> tuple[StepRecord, RunFolder]:
        record = await read_step(access.history, first)
        if record is None:
            there = await span_of(access.history, StreamName.COMMITS, "step")
            raise ConfigError(f"run {access.run_id} has no commit of step {first}: {there}, counted from 0.")
        return record, access.folder

    record, folder = read_run(options, read)
    show(step_json(record), step_tree(record, options.is_full, folder), options.as_json, options.is_full)


async def _request_profile(access: RunAccess, wanted: str) -> str:
    """Make the folder that the trainer looks for when it begins a step."""
    broker = access.history.broker
    config = access.config
    run_id = access.run_id
    if broker is None or config is None or access.is_over:
        raise ConfigError(f"run {run_id} is not running: a profile is of a step to come. Resume it first.")
    if not access.folder.path.is_dir():
        raise ConfigError(
            f"{access.folder.path} is not here: ask where the run's folder is, such as on the trainer's node"
        )
    # The number of the step in training is the number of commits so far.
    begun = id_order(await last_id(broker, access.history.keys.commits))[0]
    step = begun + 1 if wanted == "next" else parse_steps(wanted)[0]
    if not begun < step < config.trainer.steps:
        raise ConfigError(
            f"step {step} cannot be profiled: step {begun} has begun, and the last one is "
            f"{config.trainer.steps - 1}. Name one in between, or `next`."
        )
    folder = access.folder.path / PROFILES / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    return f"the trainer profiles step {step} into {nearest(folder)}, a file a rank, for ui.perfetto.dev"
