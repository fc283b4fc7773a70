"""What must hold in every run, whatever its faults (docs/architecture.md).

`see` checks each entry as it is appended, `judge` the whole run when it has ended. Both know the true
history, also what Redis has lost.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from tests.chaos import verdict as chaos
from tests.simulation import costs
from tests.simulation.fleet import Fleet
from tests.simulation.history import Record
from tests.simulation.prompt_check import missing_tickets, other_prompts
from tests.simulation.redis.stream import Stream, text_of
from tests.simulation.reward import text_of_tokens, value_of
from tests.simulation.schedule import Schedule
from tests.simulation.watch import Watch
from tidemill.common.config import RunConfig
from tidemill.common.errors import CodecError
from tidemill.common.run.state import FINISHED
from tidemill.common.store.claims import ClaimStore
from tidemill.common.streams import id_order
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Commit, DeadLetter, Message, Score, Ticket, Trajectory

REMEDIES = ("estore", "emove", "XDEL", "tart a new run", "stop the other", "tidemill ")
"""A message that ends a run names what to do: one of these stands in it."""
NO_RUN = "this Redis has no run"
"""The message for a mistyped run id, which must not be that for a Redis that was emptied."""
KINDS: dict[str, type[Message]] = {
    "prompts": Ticket,
    "prompts:eval": Ticket,
    "trajectories": Trajectory,
    "trajectories:eval": Trajectory,
    "commits": Commit,
    "dead": DeadLetter,
}
"""Streams of which every entry is looked at as it comes."""
OTHER_CONFIG = "Resume with the config the step was trained with"
FILTER = "trainer.algorithm.filter_zero_variance"
LOSSES = ("restart", "failover", "empty")
LOSING = frozenset({"lose", "lose_commits", "lose_from"})
"""Parameters of a restart or a failover after which Redis lacks its newest writes."""


class Judge:
    """Judges one run."""

    def __init__(self, watch: Watch, config: RunConfig, schedule: Schedule) -> None:
        self.watch = watch
        self.schedule = schedule
        # A commit does not say under which bound it was trained: the widest of a resumed run is allowed.
        trainer = config.trainer.model_copy(update={"max_staleness": max(schedule.bounds)})
        self.config = config.model_copy(update={"trainer": trainer})
        self.world = watch.world
        self.broken = watch.broken
        self.trainer = trainer
        self.kinds = {fault.kind for fault in schedule.faults}
        watch.keeps_parts = schedule.setup.parts in ("turns", "restore") and self.kinds.isdisjoint(
            {*LOSSES, *costs.POISON, "tear"}
        )
        watch.has_strangers = "foreign" in self.kinds
        self._claims = ClaimStore(self.world.folder / self.world.run_id)
        self._samples: dict[tuple[str, tuple[int, int]], list[Record]] = {}
        """All entries of a sample, by lane and key."""
        self._issued: dict[int, Record] = {}
        """The newest entry of each ticket number: one that was withdrawn before is another ticket."""
        self._newest = 0
        """The newest version that was ever committed."""
        self._ahead: set[str] = set()
        """Ids of trajectories that named a version which was not yet committed when they came."""

    def see(self, record: Record) -> None:
        """Check an entry that was just appended."""
        kind = KINDS.get(record.stream)
        if kind is None or not self._is_read(record, kind):
            return
        message = record.message
        if isinstance(message, Trajectory):
            lane = "eval" if record.stream.endswith(":eval") else "train"
            if not record.is_foreign:
                self.watch.published[lane, message.key] = record
            self._samples.setdefault((lane, message.key), []).append(record)
            # A trainer that reads it again later may find it in order.
            if message.max_version > self._newest and self.kinds <= costs.HARMLESS | {"foreign"}:
                self._ahead.add(record.entry_id)
        elif record.is_foreign:
            if isinstance(message, Ticket):
                lane = "eval" if record.stream.endswith(":eval") else "train"
                self.watch.copied.add((lane, message.ticket))
        elif isinstance(message, Commit):
            self._newest = max(self._newest, message.version)
            self.broken += self._judge_commit(message)
        elif isinstance(message, Ticket) and record.stream == "prompts":
            self.watch.issued(message)
            self._issued[message.ticket] = record
            self.broken += self._judge_admission(message)

    def _judge_admission(self, ticket: Ticket) -> list[str]:
        is_undisturbed = self.kinds.isdisjoint({*LOSSES, "foreign"})
        if ticket.replaces >= 0 and ticket.step < self._newest and is_undisturbed:
            return [
                f"admission: ticket {ticket.ticket} of step {ticket.step} replaces one at step {self._newest}"
            ]
        if ticket.replaces >= 0 or ticket.step <= self._newest + self.trainer.max_staleness:
            return []
        return [
            f"admission: ticket {ticket.ticket} of step {ticket.step} was issued when {self._newest} steps "
            f"were committed and max_staleness is {self.trainer.max_staleness}"
        ]

    def _is_read(self, record: Record, kind: type[Message]) -> bool:
        try:
            record.message = self._claims.resolve(codec.decode(record.fields, kind))
        except CodecError:
            return False
        return True

    def _judge_commit(self, commit: Commit) -> list[str]:
        """It says what was trained, and a trainer that starts now can train it again."""
        trained = [samples for samples in self.watch.trained.get(commit.digest, ()) if samples]
        if not trained:
            return [f"commit: no policy has trained what step {commit.step} says"]
        problems = list[str]()
        prompts = dict[int, set[bytes]]()
        for key in commit.trained_keys:
            trained_ids = {samples.get(key) for samples in trained}
            records = [
                record
                for record in self._samples.get(("train", key), ())
                if record.message.completion_ids.tobytes() in trained_ids
            ]
            prompts.setdefault(key[0], set()).update(
                record.message.prompt_ids.tobytes() for record in records
            )
            if key[0] in self._issued:
                prompts[key[0]].add(self._issued[key[0]].message.prompt_ids.tobytes())
            ages = [
                -1
                if record.message.max_version > commit.step or record.entry_id in self._ahead
                else commit.step - record.message.min_version
                for record in records
            ]
            issued_at = self._issued[key[0]].at_s if key[0] in self._issued else 0.0
            standing = [record for record in self._samples.get(("train", key), ()) if not record.is_lost]
            standing = [record for record in standing if record.at_s >= issued_at]
            is_later = any(record in records for record in standing[1:]) and standing[0] not in records
            if is_later and "empty" not in self.kinds:
                problems.append(f"join: step {commit.step} trained {key}, not as it came first")
            if not any(0 <= age <= self.trainer.max_staleness for age in ages):
                problems.append(
                    f"staleness: step {commit.step} trained {key}, of tokens so many steps old: {ages}"
                )
            is_gone = all(record.is_lost for record in records) and not self.schedule.setup.archive
            if is_gone and self._newest_checkpoint() < commit.version:
                problems.append(
                    f"durability: step {commit.step} trained {key}, which nobody could train again"
                )
        if mixed := [ticket for ticket, texts in prompts.items() if len(texts) > 1]:
            problems.append(f"prompt: step {commit.step} trained tickets {mixed[:5]} on two prompts")
        return problems

    def _newest_checkpoint(self) -> int:
        folder = self.world.folder / self.world.run_id / "checkpoints"
        return max((int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit()), default=0)

    def judge(self, fleet: Fleet, injector: Any, verdict: Any) -> None:
        """Add everything that is wrong with the run to the verdict."""
        problems = [*(f"crash: {crash}" for crash in fleet.crashes), *self.broken, *self.world.disk.broken]
        if fleet.outcome == FINISHED:
            problems += self._judge_history()
            problems += self._judge_records()
            problems += costs.dropped_without_need(self.schedule, self._commits())
            problems += costs.left_behind(self.world, self.schedule)
        elif "empty" not in self.kinds:
            problems += self._judge_digests(self._commits())
        problems += self._judge_letters()
        problems += costs.dead_letters(self.world, self.schedule, self._commits())
        num_restarts = len(self.world.processes) - len(fleet.members)
        problems += costs.made_again(self.watch.num_again, injector.done, self.config, num_restarts)
        verdict.violations += problems

    def may_end(self, outcome: str, num_torn: int) -> bool:
        """Whether the run may have ended with this error: no repair is possible, and the message is clear.

        `num_torn` is the most checkpoints that were torn without a new one in between.
        """
        if OTHER_CONFIG in outcome:
            # What was trained before the change is replayed from before it, under another filter.
            return any(FILTER in f.how["set"] for f in self.schedule.faults if f.kind == "config")
        if not any(word in outcome for word in REMEDIES) or NO_RUN in outcome:
            return False
        has_losses = any(
            f.kind == "empty" or (f.kind in LOSSES and not LOSING.isdisjoint(f.how))
            for f in self.schedule.faults
        )
        if "lost its tokens" in outcome and "vanish" in self.kinds:
            return True
        is_torn = (num_torn and has_losses) or num_torn >= self.trainer.keep_checkpoints
        return "empty" in self.kinds or bool(is_torn)

    def standing(self) -> str:
        """Where the run stands, in words, for a stall."""
        server = self.world.cluster.server
        lengths = {
            self.world.keys.name_of(key.decode()): len(value.ids)
            for key, value in sorted(server.space.values.items())
            if isinstance(value, Stream)
        }
        pending = {
            self.world.keys.name_of(key.decode()): len(group.pending)
            for key, value in sorted(server.space.values.items())
            if isinstance(value, Stream)
            for group in value.groups.values()
            if group.pending
        }
        return f"version {self._newest} of {self.trainer.steps}, streams {lengths}, pending {pending}"

    def _messages(self, stream: str, kind: type[Message], is_lost: bool = False) -> list[Any]:
        records = self.world.history.of(stream, is_lost)
        return [
            record.message for record in records if record.message is not None or self._is_read(record, kind)
        ]

    def _commits(self) -> list[Commit]:
        """The commits that the stream holds at the end, and those trimmed before."""
        stream = self.world.cluster.server.space.values.get(self.world.keys.commits.encode())
        by_id = {
            record.entry_id: record for record in self.world.history.of("commits") if not record.is_foreign
        }
        ids = [text_of(entry_id).decode() for entry_id in stream.ids] if stream else []
        if self.world.kept_commits < self.trainer.steps and ids:
            # Of those that Redis lost, the trainer gives back the newest only: the journal has the others.
            lost = {record.entry_id: record for record in self.world.history.of("commits", is_lost=True)}
            by_id = {i: record for i, record in lost.items() if id_order(i) < id_order(ids[0])} | by_id
            ids = [*sorted({i for i in by_id if id_order(i) < id_order(ids[0])}, key=id_order), *ids]
        return [by_id[entry_id].message for entry_id in ids if entry_id in by_id]

    def _judge_history(self) -> list[str]:
        commits = self._commits()
        steps = [commit.step for commit in commits]
        if steps != list(range(self.trainer.steps)):
            return [
                f"commits: the run is finished with steps {steps}, expected 0 to {self.trainer.steps - 1}"
            ]
        # A commit stands first: what a copy of the same key says later is a duplicate.
        lost = self._messages("trajectories", Trajectory, is_lost=True)
        archive = SimpleNamespace(
            commits=SimpleNamespace(messages=commits),
            tickets=SimpleNamespace(messages=[t for t in self._tickets()]),
            trajectories=SimpleNamespace(
                messages=self._messages("trajectories", Trajectory), lost=dict(enumerate(lost))
            ),
            dead=SimpleNamespace(entries=[]),
        )
        history: Any = chaos.judge(archive, self.trainer.group_size, self.trainer.max_staleness)  # type: ignore[arg-type]
        problems = self._judge_waits(commits)
        if history.lost or history.duplicated or history.violations or history.gaps:
            problems.append(f"history: {history}")
        if any(len(commit.groups) != self.trainer.groups_per_step for commit in commits):
            problems.append("groups: a step has another number of groups than groups_per_step")
        ends = Counter(t for commit in commits for t in {*commit.groups, *_dropped_whole(commit)})
        if twice := [ticket for ticket, count in ends.items() if count > 1]:
            problems.append(f"ends: tickets {twice[:5]} have two ends")
        problems += other_prompts(self.config, self.world.history, commits)
        if self.kinds.isdisjoint({*LOSSES, "foreign"}):
            problems += missing_tickets(self._tickets())
        return problems + self._judge_digests(commits) + self._judge_advantages(commits)

    def _judge_waits(self, commits: list[Commit]) -> list[str]:
        """Tickets that Redis has lost are not waited for during `reissue_after_s`: that is known at once."""
        if not self.kinds.isdisjoint({"foreign", "empty", "damage", "older"}):
            return []
        late = [ticket for commit in commits for ticket, _, reason in commit.dropped if reason == "lost"]
        return (
            [f"late: tickets {late} were given up after {self.trainer.reissue_after_s:g} s"] if late else []
        )

    def _tickets(self) -> list[Ticket]:
        tickets = [record.message for record in self.world.history.of("prompts") if not record.is_foreign]
        return [ticket for ticket in tickets if ticket.ticket not in self.watch.withdrawn]

    def _judge_digests(self, commits: list[Commit]) -> list[str]:
        """The simulated policy's digest follows from the commits alone."""
        chain = xxhash.xxh3_128(b"simulated").digest()
        problems = []
        for number, commit in enumerate(commits):
            if commit.step != number:
                break
            for mini in commit.mini_batches * commit.passes:
                parts = [chain]
                for micro in mini:
                    for ticket, index in micro:
                        trained = sorted(i for t, i in commit.trained_keys if t == ticket)
                        advantage = commit.advantages[str(ticket)][trained.index(index)]
                        parts += [
                            np.array((ticket, index), "<i8").tobytes(),
                            np.array(advantage, "<f8").tobytes(),
                        ]
                    parts.append(b"|")
                chain = xxhash.xxh3_128(b"".join(parts)).digest()
            if chain.hex() != commit.digest:
                problems.append(f"digest: that of version {commit.version} does not follow from the commits")
                break
        return problems

    def _judge_advantages(self, commits: list[Commit]) -> list[str]:
        """Better rewards have better advantages, and samples without a reward are not trained."""
        problems = []
        for commit in commits:
            trained = self.watch.trained.get(commit.digest, [{}])[-1]
            rewards = {
                key: value_of(text_of_tokens(np.frombuffer(ids, np.int32))) for key, ids in trained.items()
            }
            for ticket in commit.groups:
                indices = sorted(i for t, i in commit.trained_keys if t == ticket)
                values = [rewards.get((ticket, index)) for index in indices]
                if None in values:
                    problems.append(
                        f"reward: step {commit.step} trained a sample of ticket {ticket} without one"
                    )
                elif not _same_order(values, commit.advantages[str(ticket)]):
                    problems.append(f"advantages: those of ticket {ticket} do not follow from its rewards")
        return problems

    def _judge_records(self) -> list[str]:
        """What is on the disk and in the streams at the end."""
        problems = []
        path = self.world.folder / self.world.run_id / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        is_torn = any(f.kind == "tear" and f.how["what"] == "metrics" for f in self.schedule.faults)
        if steps != list(range(self.trainer.steps)) and not is_torn:
            problems.append(f"records: metrics.jsonl has the steps {steps}")
        is_lossless = self.kinds.isdisjoint({*LOSSES, "foreign", "damage", "older"})
        if is_lossless:
            for stream, kind in (("trajectories", Trajectory), ("scores", Score)):
                counts = Counter(message.key for message in self._messages(stream, kind))
                if twice := [key for key, count in counts.items() if count > 1]:
                    problems.append(f"published twice: {stream} has {twice[:5]} more than once")
        if (
            self.schedule.setup.evaluation
            and self.kinds.isdisjoint({"foreign", "empty", "damage", "older"})
            and not is_torn
        ):
            problems += self._judge_evaluations(lines)
        if self.schedule.setup.archive and "empty" not in self.kinds:
            problems += self._judge_archive()
        return problems

    def _judge_evaluations(self, lines: list[dict[str, Any]]) -> list[str]:
        steps = self.trainer.steps
        due = {0, steps, *range(2, steps, 2)}
        done = Counter(line["version"] for line in lines if line["kind"] == "evaluation")
        if set(done) != due or any(count > 1 for count in done.values()):
            return [f"evaluations: {dict(done)} are on record, due are {sorted(due)}, each once"]
        return []

    def _judge_archive(self) -> list[str]:
        """Archive and Redis together hold all that was not lost."""
        from tests.simulation.archive_check import missing_ids, other_choices

        is_whole = self.kinds.isdisjoint({"foreign", "vanish"})
        return missing_ids(self.world) + (other_choices(self.watch, self.config) if is_whole else [])

    def _judge_letters(self) -> list[str]:
        """Dead letters keep the bytes of what they are about."""
        by_id: dict[tuple[str, str], list[dict[bytes, bytes]]] = {}
        for record in self.world.history.records:
            by_id.setdefault((record.stream, record.entry_id), []).append(record.fields)
        problems = []
        for letter in self._messages("dead", DeadLetter):
            originals = by_id.get((letter.origin, letter.entry_id))
            fields = {name.encode(): value for name, value in letter.fields.items()}
            if letter.entry_id and originals is not None and fields not in originals:
                problems.append(f"letters: that of {letter.origin} {letter.entry_id} has other bytes")
        return problems


def _dropped_whole(commit: Commit) -> list[int]:
    return [ticket for ticket, index, _ in commit.dropped if index == chaos.WHOLE_GROUP]


def _same_order(values: list[float | None], advantages: list[float]) -> bool:
    pairs = sorted(zip(values, advantages, strict=True))  # type: ignore[type-var]
    return all(
        (a[0] == b[0]) == (abs(a[1] - b[1]) < 1e-9) and a[1] <= b[1] + 1e-9
        for a, b in itertools.pairwise(pairs)
    )


__all__ = ["Judge", "Path"]
