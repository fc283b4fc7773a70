"""Commits: the write-ahead record of a step, appended before its version is announced.

A commit's entry id is its step's, so it can be appended once only: a second trainer on the same run
finds the place taken and ends, instead of training anything twice.
"""

import time

import structlog

from common.errors import TidemillError
from common.redis.broker import Broker
from common.streams import Entry, Garbled, append_after, entry_id_of, id_order, last_id, read_range
from common.wire import codec
from common.wire.keys import Keys
from common.wire.messages import Commit
from services.trainer.batch.batch_assembler import Dropped
from services.trainer.batch.strays import is_stray, move_strays_aside
from services.trainer.step import StepResult

log = structlog.get_logger(__name__)


class LostTailError(TidemillError):
    """The stream ends before the commit's predecessor: Redis has lost what was committed before."""


class SecondTrainerError(TidemillError):
    """Another trainer has committed this step."""


def make_commit(
    step: int,
    result: StepResult,
    dropped: list[Dropped],
    metrics: dict[str, float],
    digest: str,
    started_at: float,
) -> Commit:
    """The record of a step that has just updated the weights."""
    left_out = [(group.ticket, index, reason) for group in result.groups for index, reason in group.left_out]
    advantages = {str(g.ticket): [sample.mean_advantage for sample in g.samples] for g in result.groups}
    return Commit(
        step=step,
        version=step + 1,
        mini_batches=tuple(tuple(batch.keys for batch in mini.micro_batches) for mini in result.mini_batches),
        groups=tuple(group.ticket for group in result.groups),
        dropped=(*dropped, *left_out),
        advantages=advantages,
        metrics=metrics,
        digest=digest,
        started_at=started_at,
        finished_at=time.time(),
    )


async def append_commit(broker: Broker, keys: Keys, commit: Commit) -> None:
    """Append a commit under its step's id, right behind that of the step before, in one atomic unit.

    Raises:
        LostTailError: the commit before is not there: it has to come back first.
        SecondTrainerError: the step has a commit that is not this one.
    """
    entry_id = entry_id_of(commit.step)
    while id_order(last := await last_id(broker, keys.commits)) < id_order(entry_id):
        if commit.step and id_order(last) < id_order(entry_id_of(commit.step - 1)):
            raise LostTailError(f"the commits of run {keys.run_id} end before step {commit.step - 1}")
        if await append_after(broker, keys.commits, last, entry_id, commit):
            return
    if await move_strays_aside(broker, keys, keys.commits, Commit):
        return await append_commit(broker, keys, commit)
    found = await read_range(broker, keys.commits, Commit, entry_id, entry_id)
    for entry in found:
        if isinstance(entry, Garbled):
            raise TidemillError(
                f"step {commit.step} of run {keys.run_id} cannot be committed: entry {entry.entry_id} of "
                f"{keys.commits} has its place, and cannot be read ({entry.error}). If a newer release "
                "wrote it, go on with that one; else remove it (XDEL, then XSETID to the commit before), and "
                "restart."
            )
    # Compared as bytes: a metric that is not a number differs from itself.
    ours = codec.encode_payload(commit)
    if not any(isinstance(entry, Entry) and codec.encode_payload(entry.message) == ours for entry in found):
        raise SecondTrainerError(
            f"step {commit.step} of run {keys.run_id} was committed by another trainer. "
            "One run has one trainer: stop the other one, or give this one a run id of its own."
        )


async def read_commits(broker: Broker, keys: Keys, first_step: int) -> list[Commit]:
    """Commits from `first_step` on, in order.

    Raises:
        TidemillError: a commit cannot be decoded, or one is missing in between.
    """
    entries = await read_range(broker, keys.commits, Commit, entry_id_of(first_step))
    commits: list[Commit] = []
    for entry in entries:
        expected = first_step + len(commits)
        if is_stray(entry):  # with commits of ours behind it, so that it can stay
            log.error("a foreign entry among the commits is passed over", entry=entry.entry_id)
            continue
        if isinstance(entry, Garbled):
            raise TidemillError(f"commit {entry.entry_id} of run {keys.run_id} is unreadable: {entry.error}")
        if entry.message.step != expected:
            raise TidemillError(
                f"run {keys.run_id} has a commit of step {entry.message.step} where step {expected} is due; "
                "restore a checkpoint of a later version, or the stream from its backup"
            )
        commits.append(entry.message)
    return commits
