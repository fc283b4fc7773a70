"""`tidemill trace`: what became of a ticket and of one of its samples; a session turn by turn."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tidemill.common.errors import ConfigError
from tidemill.common.history import StreamName
from tidemill.common.streams.selection import leaves_in
from tidemill.common.wire.arrays import Float64
from tidemill.common.wire.choices import KEPT
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Lane, Score, Ticket, Trajectory, is_demonstration
from tidemill.common.wire.segments import UnreadAnswer
from tidemill.services.console.commands import TraceOptions
from tidemill.services.console.look.joins import GroupRecord, Place, SampleRecord, read_group
from tidemill.services.console.look.selection import parse_sample, span_of
from tidemill.services.console.look.sessions import (
    SessionFacts,
    SessionRecord,
    TurnRecord,
    calls_of,
    generation_s,
    num_completion_tokens,
    read_session,
    session_facts,
    text_of,
)
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import RunAccess, read_run
from tidemill.services.console.text.formats import NOTHING, number, plural, sample_name, took, when
from tidemill.services.console.text.tree import Node, jsonable, note, part, show, table


def group_tree(group: GroupRecord, sample: SampleRecord | None = None, run: RunFolder | None = None) -> Node:
    """A ticket with its samples side by side, or one sample from its ticket to the version that it made. With
    `run` a hint names the command that shows the step."""
    if sample is None:
        head = f"ticket {group.number}  {outcome(group)}"
        rows = [table((_sample_row(group, item) for item in group.samples), {"took": "s", "scored in": "s"})]
        return part(head, _ticket_lines(group), rows if group.samples else [], _outcome_lines(group, run))
    head = f"sample {group.number}.{sample.index}  {outcome(group, sample)}"
    return part(head, _ticket_lines(group), sample_parts(group, sample, run=run))


def outcome(group: GroupRecord, sample: SampleRecord | None = None) -> str:
    commit = group.commit
    if commit is not None and sample is not None and sample.left_out:
        return f"left out of step {commit.step}: {sample.left_out}"
    if commit is not None and group.is_trained:
        return f"trained in step {commit.step}, which made version {commit.version}"
    if commit is not None and group.dropped_as:
        return f"dropped before step {commit.step}: {group.dropped_as}"
    num_made = sum(1 for item in group.samples if item.trajectory)
    num_scored = sum(1 for item in group.samples if item.score)
    words = f"{num_made} of {group.group_size} samples generated, {num_scored} scored"
    return f"evaluation: {words}" if group.lane == "eval" else f"no step has trained on it: {words}"


def _ticket_lines(group: GroupRecord) -> Iterator[Node]:
    source = group.prompt_source
    if source is not None:
        yield Node("prompt", source.prompt_text, "text")
        of = f"source {source.source}, " if source.source else ""
        yield Node("", f"{len(source.prompt_ids)} tokens, {of}data source {source.data_source or NOTHING}")
        for position, image in enumerate(group.prompt_images, 1):
            yield _picture_line(group, position, image)
        if source.ground_truth is not None:
            yield Node("ground truth", source.ground_truth)
    if is_demonstration(group.number):
        yield Node("issued", "a demonstration: the trainer has published it, without ticket and score")
        return
    ticket = group.ticket
    if ticket is None:
        yield Node("issued", "the ticket itself is gone from the streams")
        return
    words = f"{when(ticket.issued_at)}, meant for step {ticket.step}, needs version {ticket.min_version}"
    yield Node("issued", words + (f", row {ticket.row} of the data" if ticket.row >= 0 else ""))
    if ticket.replaces >= 0:
        yield Node("replaces", f"ticket {ticket.replaces}", link=f"groups/{ticket.replaces}")


def _picture_line(group: GroupRecord, position: int, image: Image) -> Node:
    folder = "eval-groups" if group.lane is Lane.EVAL else "groups"
    link = f"{folder}/{group.number}/pictures/{image.digest}.png"
    fork = f"fork {image.segment}, " if image.segment else ""
    tokens = f"{fork}tokens {image.first} to {image.end - 1}"
    text = f"{image.width} x {image.height}, {tokens}, images/{image.digest}.png"
    return Node(f"picture {position}", text, link=link)


def _sample_row(group: GroupRecord, sample: SampleRecord) -> dict[str, Any]:
    trajectory = sample.trajectory
    score = sample.score
    facts = session_facts(trajectory) if trajectory else None
    is_scored = score is not None and score.value is not None
    return {
        "sample": sample_name(group.number, sample.index),
        "reward": sample.reward,
        "advantage": sample.advantage,
        "score": Node("score", score.status.value if score else None, style="" if is_scored else "red"),
        "tries": score.attempts if score else None,
        "version": None if is_demonstration(group.number) else _versions(sample),
        "turns": len(facts.turns) if facts else None,
        "tokens": sum(num_completion_tokens(trajectory)) if trajectory else None,
        "generated by": trajectory.worker if trajectory else None,
        "took": generation_s(trajectory) if trajectory else None,
        "scored by": score.worker if score else None,
        "scored in": score.latency_s if score else None,
        "trained in": sample.left_out or _places(sample.places),
        "completion": trajectory.text if trajectory else None,
    }


def _versions(sample: SampleRecord) -> str:
    return " → ".join(str(version) for version, _, _ in sample.spans)


def sample_parts(
    group: GroupRecord, sample: SampleRecord, with_text: bool = True, run: RunFolder | None = None
) -> Iterator[Node]:
    """How a sample was generated, what it says, how it was scored, and what was trained."""
    trajectory = sample.trajectory
    if trajectory is not None:
        yield part("generation", _generation_lines(group.ticket, sample))
        yield from session_parts(trajectory)
        further_pictures = list(_further_picture_lines(group, trajectory))
        if further_pictures:
            yield part("pictures of the session", further_pictures)
        if with_text and (trajectory.session is None or not trajectory.session.messages):
            if trajectory.thought:
                yield part("thought", Node("", trajectory.thought, "text"))
            yield part("completion", Node("", trajectory.text or "(empty)", "text"))
    if sample.score is not None:
        yield part("reward", _score_lines(trajectory, sample.score))
    for score in sample.later_scores:
        yield note(f"a later score, not counted: {number(score.value)} from {score.worker}", "yellow")
    yield part("training", _training_lines(group, sample), _outcome_lines(group, run))


def _generation_lines(ticket: Ticket | None, sample: SampleRecord) -> Iterator[Node]:
    trajectory = sample.trajectory
    assert trajectory is not None
    trained = "" if trajectory.loss_mask is None else f", {int(trajectory.mask.sum())} of them trained"
    tokens = Node("tokens", f"{trajectory.num_tokens}{trained}, ended by {trajectory.finish}")
    if is_demonstration(trajectory.ticket):
        yield tokens
        return
    waited_s = trajectory.started_at - ticket.issued_at if ticket and trajectory.started_at else None
    yield Node("worker", trajectory.worker)
    yield Node("queued", f"{took(waited_s)} from the ticket to the start of its group")
    yield Node("took", f"{took(generation_s(trajectory))}, finished {when(trajectory.finished_at)}")
    yield tokens
    for version, first, last in sample.spans:
        words = f" made tokens {first} to {last}" if last >= first else ", no token"
        yield Node("version", f"{version}{words}")
    sampled = trajectory.logprobs[trajectory.mask]
    if len(sampled):
        yield Node("logprobs", f"mean {float(sampled.mean()):.4g}, least {float(sampled.min()):.4g}")
    for later in sample.later_trajectories:
        yield Node("again", f"by {later.worker}, {when(later.finished_at)}: not counted")


def _score_lines(trajectory: Trajectory | None, score: Score) -> Iterator[Node]:
    yield Node("reward", score.value if score.value is not None else f"none: {score.status}")
    if score.error:
        yield Node("error", score.error)
    if score.on_failure:
        yield Node("asks for", score.on_failure)
    for name, value in score.components.items():
        yield Node("component", f"{name}  {number(value)}")
    gaps = teacher_gaps(trajectory, score)
    if gaps is not None and len(gaps):
        words = f"mean {number(float(gaps.mean()))}, most {number(float(gaps.max()))} nats a token"
        yield Node("teacher", f"logprob - teacher's: {words}")
    after_s = score.scored_at - trajectory.finished_at if trajectory and trajectory.finished_at else None
    yield Node("worker", score.worker)
    yield Node("scored", f"{when(score.scored_at)}, {took(after_s)} after the completion")
    yield Node("latency", f"{took(score.latency_s)} in {plural(score.attempts, 'attempt')}")
    for attempt, (name, took_s, paused_s, error) in enumerate(score.tries, 1):
        pause = f", after a pause of {took(paused_s)}" if attempt > 1 and paused_s else ""
        yield Node(f"attempt {attempt}", f"{name}: {took(took_s)}{pause}: {error or 'answered'}")
    for path, value in leaves_in("", score.detail):
        yield Node(path.removeprefix("."), value, "text" if isinstance(value, str) else "")


def teacher_gaps(trajectory: Trajectory | None, score: Score) -> Float64 | None:
    """Logprob of the policy less that of its teacher, of each token that it sampled; None where they are not
    known, not of the same tokens, or with sampling masks: the teacher's are over all ids."""
    if trajectory is None or score.teacher_logprobs is None:
        return None
    if trajectory.choices is not None and KEPT in trajectory.choices.rows:
        return None
    sampled = np.concatenate([segment.logprobs[segment.mask] for segment in trajectory.segments])
    if len(sampled) != len(score.teacher_logprobs):
        return None
    return sampled.astype(np.float64) - score.teacher_logprobs


def _training_lines(group: GroupRecord, sample: SampleRecord) -> Iterator[Node]:
    if group.lane == "eval":
        yield Node("", "samples of evaluation are not trained")
    elif sample.left_out:
        yield Node("left out", sample.left_out)
    elif not group.is_trained:
        yield Node("", f"not trained: {group.dropped_as}" if group.dropped_as else "not yet")
    elif sample.trajectory is not None and sample.trajectory.is_greedy:
        yield Node("", "not trained: it is the baseline of its group")
    else:
        rewards = [s.reward for s in group.samples if s.reward is not None]
        yield Node("group", f"rewards {'  '.join(map(number, rewards))}")
        yield Node("advantage", sample.advantage)
        yield Node("trained in", _places(sample.places))


def _outcome_lines(group: GroupRecord, run: RunFolder | None) -> Iterator[Node]:
    commit = group.commit
    if commit is not None and group.is_trained:
        began = when(commit.started_at)
        ended = took(commit.finished_at - commit.started_at)
        more = f"; more: {run.command('step', str(commit.step))}" if run is not None else ""
        words = f"{commit.step}, begun {began}, {ended}{more}"
        yield Node("step", words, link=f"steps/{commit.step}")
        announced = f", announced {when(group.manifest.announced_at)}" if group.manifest else ""
        yield Node("made", f"version {commit.version}, digest {commit.digest}{announced}")
    elif commit is not None and group.dropped_as:
        words = f"{group.dropped_as}; recorded by the commit of step {commit.step}"
        yield Node("dropped", words, link=f"steps/{commit.step}")
    if group.replaced_by is not None:
        yield Node("replaced by", f"ticket {group.replaced_by}", link=f"groups/{group.replaced_by}")
    for entry_id, dead in group.letters:
        source = f"{dead.origin} {sample_name(dead.ticket, dead.index)} by {dead.worker}"
        yield Node("dead letter", f"{when(dead.died_at)}  {source}: {dead.error}", link=f"dead/{entry_id}")


def _places(places: list[Place]) -> str:
    return "; ".join(
        dict.fromkeys(f"mini {position.mini_batch}, micro {position.micro_batch}" for position in places)
    )


STYLES = {"assistant": "bold", "tool": "cyan"}


def session_parts(trajectory: Trajectory) -> Iterator[Node]:
    """A session's numbers, its turns side by side, its forks, and what was said; none of a single turn."""
    facts = session_facts(trajectory)
    record = read_session(trajectory)
    if facts is None:
        return
    turns = table(map(_turn_row, record.turns), {"engine": "s", "environment": "s"})
    forks = (
        note(
            f"fork {number}: {len(fork.prompt_ids):,} tokens of prompt, {len(fork.completion_ids):,} after "
            f"it, {int(fork.mask.sum()):,} of them trained"
        )
        for number, fork in enumerate(trajectory.forks, 1)
    )
    assert trajectory.session is not None
    unread = map(_unread, trajectory.session.unread)
    yield part("session", _session_lines(trajectory, facts), turns, forks, _said(record), unread)


def _further_picture_lines(group: GroupRecord, trajectory: Trajectory) -> Iterator[Node]:
    """A line for each picture that a session shows beside those of the row, at its first place; numbered by
    the places of all, as on the page of the group."""
    listed = {image.digest for image in group.prompt_images}
    for position, image in enumerate(trajectory.images, 1):
        if image.digest not in listed:
            listed.add(image.digest)
            yield _picture_line(group, position, image)


UNREAD = {
    "not_delivered": "its response broke before its end",
    "cut": "the client went on with a beginning of it",
    "asked_again": "the same was asked again, or the agent began again: another answer counts",
}


def _unread(answer: UnreadAnswer) -> Node:
    title = f"not trained: {UNREAD[answer.why]}, {answer.num_tokens:,} tokens"
    return part(title, message_lines(answer.message))


def _said(record: SessionRecord) -> Iterator[Node]:
    if record.unplaced and record.turns and record.turns[0].said is None:
        yield note("which turn said which message is not known", "dim")
    for message in record.unplaced:
        yield from message_lines(message)
    for turn in record.turns:
        if turn.said is not None:
            messages = (turn.said, *turn.answers)
            yield part(f"turn {turn.number}", *(message_lines(message) for message in messages))


def _session_lines(trajectory: Trajectory, facts: SessionFacts) -> Iterator[Node]:
    session = trajectory.session
    assert session is not None
    trained, others = num_completion_tokens(trajectory)
    yield Node("environment", session.environment)
    end = "ended by itself" if session.end == "done" else f"truncated by {facts.end}"
    forks = f", {plural(len(trajectory.forks), 'fork')}" if trajectory.forks else ""
    yield Node("turns", f"{len(facts.turns)}{forks}, {end}")
    yield Node("tokens", f"{trained:,} of the model, {others:,} of the environment")
    engine = took(facts.engine_s)
    environment = took(facts.environment_s)
    yield Node("time", f"{engine} in the engine, {environment} in the environment")
    if session.reward is not None:
        yield Node("reward", f"{number(session.reward)} from the environment")
    if session.num_faults:
        tries = plural(session.num_faults, "attempt")
        yield Node("faults", f"{tries} before this one ended in an environment's fault")
    if session.unread:
        lost_tokens = sum(answer.num_tokens for answer in session.unread)
        answers = plural(len(session.unread), "answer")
        yield Node("unread", f"{answers} of {lost_tokens:,} tokens that no program has read; not trained")
    for label, values in (("histories", session.histories), ("metrics", session.metrics)):
        if values:
            yield Node(label, "  ".join(f"{name} {number(value)}" for name, value in values.items()))


def _turn_row(record: TurnRecord) -> dict[str, Any]:
    turn = record.turn
    wrong = f", {turn.num_wrong_calls} wrong" if turn.num_wrong_calls else ""
    return {
        "turn": record.number,
        "segment": record.segment,
        "version": " → ".join(map(str, record.versions)),
        "tokens": turn.num_tokens,
        "trained": record.num_trained,
        "end": turn.finish,
        "before it": turn.num_prompt_tokens,
        "cached": turn.num_cached_tokens if turn.num_cached_tokens >= 0 else None,
        "engine": turn.engine_s,
        "calls": f"{turn.num_calls}{wrong}" if turn.num_calls else None,
        "answer": record.num_answer_tokens or None,
        "environment": turn.environment_s or None,
        "reward": turn.reward,
    }


def message_lines(message: Mapping[str, Any]) -> Iterator[Node]:
    """What a chat message thinks, says and calls."""
    role = str(message.get("role", "?"))
    name = f" {message['name']}" if message.get("name") else ""
    head = {"assistant": "model"}.get(role, role) + name
    thought = text_of(message.get("reasoning_content"))
    said = text_of(message.get("content"))
    calls = calls_of(message)
    if thought:
        yield Node(f"{head} thinks", thought, "text", style="dim")
    if said or not (calls or thought):
        yield Node(head, said or "(empty)", "text", style=STYLES.get(role, ""))
    for called, arguments in calls:
        yield Node(f"{head} calls", f"{called}({arguments})", "text", style="magenta")


def group_json(group: GroupRecord, index: int | None = None) -> dict[str, Any]:
    """For programs: everything, or with one of the samples only; sessions also turn by turn."""
    samples = [
        jsonable(sample)
        | {"turns": jsonable(read_session(sample.trajectory).turns if sample.trajectory else ())}
        for sample in group.samples
        if index in (None, sample.index)
    ]
    more = {"is_trained": group.is_trained, "dropped_as": group.dropped_as}
    return {**jsonable(group), "samples": samples, **more}


def show_trace(options: TraceOptions) -> None:
    ticket, index = parse_sample(options.sample)
    lane = Lane(options.lane)

    async def read(access: RunAccess) -> tuple[GroupRecord, RunFolder]:
        group = await read_group(access.history, ticket, lane)
        if not (group.ticket or group.samples or group.letters or group.commit):
            there = await span_of(access.history, StreamName.PROMPTS.of(lane), "ticket")
            raise ConfigError(
                f"run {access.run_id} knows no ticket {ticket} of the lane {lane}: {there}. Where older ones "
                "were trimmed without an archive, they are gone."
            )
        return group, access.folder

    group, folder = read_run(options, read)
    sample = next((sample for sample in group.samples if sample.index == index), None)
    if index is not None and sample is None:
        indexes = ", ".join(str(sample.index) for sample in group.samples) or "none"
        raise ConfigError(f"ticket {ticket} has no sample {index} in the streams; it has {indexes}.")
    show(group_json(group, index), group_tree(group, sample, folder), options.as_json, options.is_full)
