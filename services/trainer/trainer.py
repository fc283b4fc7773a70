"""The trainer: admit tickets, train a step on their groups, commit, announce, repeat.

A step becomes durable in this order, which makes it exactly-once. Other files name the parts by number.

1. Journal: the commit is written to the run's folder, so that whatever Redis loses later can come back.
2. Settle: its groups are no longer outstanding. From here on a checkpoint is one of the new version.
3. Mark: a value in Redis before the commit; a server that has lost it takes no commit.
4. Checkpoint, only where Redis may have lost records that the step was trained on, so that no replay could
   repeat it. The checkpoint replaces the replay then; what else was lost is appended again.
5. Commit: appended under the step's id, right behind the commit before, if the mark stands. The step has
   happened; before, a restart trains it again from the same records.
6. Write: the weights go to the disk beside the next step's work, and to the object store if there is one.
7. Announce: the manifest of files that are whole and on the disk. The next step's commit waits for this.

A crash after 1 leaves a commit in the journal that Redis does not have: recovery cuts it off, unless a
checkpoint covers it (4). After 5, recovery trains the step again from its records, which gives the same
weights; what is missing of 6 and 7 is done then. A checkpoint that falls due without a restart of Redis is
copied between two steps and written beside those that follow.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from tidemill.common.files import free_share
from tidemill.common.process.activity import BOOKKEEPING, WAIT
from tidemill.common.process.heartbeats import DAMAGED_VERSION, read_heartbeats
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.run.state import FINISHED, PROFILES, RUNNING, finish_state, update_state
from tidemill.common.streams import Mark, MarkLostError, entry_id_of, id_order, last_id, read_newest
from tidemill.common.streams.group_results import delete_results
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Commit, Lane, WeightManifest
from tidemill.services.trainer.batch.batch_assembler import QUIET_S, BatchAssembler
from tidemill.services.trainer.durable.checkpointing import Checkpointer
from tidemill.services.trainer.durable.commits import (
    CommitJournal,
    LostTailError,
    append_commit,
    restore_commits,
)
from tidemill.services.trainer.durable.memory_watch import MemoryWatch
from tidemill.services.trainer.durable.waiting import BackgroundWork, During, on_disk, until_stored
from tidemill.services.trainer.metrics.diagnostics import Diagnostics
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.metrics.step_metrics import observe_step, step_metrics, usage_metrics
from tidemill.services.trainer.policy.usage import Usage
from tidemill.services.trainer.step import StepResult, StepRunner, make_commit
from tidemill.services.trainer.weights.store import BegunVersion, WeightState, WeightStore

if TYPE_CHECKING:
    from tidemill.services.trainer.evaluation import Evaluator
    from tidemill.services.trainer.weights.best_version import BestVersion

log = structlog.get_logger(__name__)

WRITING = "weights"
"""The activity while weights are compared or waited for."""
SHUTDOWN_TIMEOUT_S = 10.0
"""A trainer that has to stop finishes writing and announcing a version, if that takes no longer."""
LOOK_S = 5.0
"""How often workers' reports of damaged weights are read."""
DAMAGED = (
    "a rollout worker finds the files of a version damaged: it is written again in full, or the next one is. "
    "Look at the disk of the run's folder, and at the way from there to the worker"
)


@dataclass(kw_only=True)
class Trainer:
    """Owns the version: the number of committed steps."""

    context: ServiceContext
    version: int
    assembler: BatchAssembler
    runner: StepRunner
    evaluator: "Evaluator | None"
    """None where a run has no evaluation sets, and never had any."""
    journal: CommitJournal
    checkpointer: Checkpointer
    memory: MemoryWatch
    weights: WeightStore
    best: "BestVersion | None"
    """None where a run has no evaluation sets, and no evaluation on record."""
    recorder: Recorder
    diagnostics: Diagnostics

    def __post_init__(self) -> None:
        self.config = self.context.config.trainer
        self.scheduler = self.assembler.scheduler
        self.join = self.assembler.join
        self.reconciler = self.assembler.reconciler
        self.trained_version = self.version
        """Version of the policy's weights: ahead of `version` between a step's update and its commit."""
        self._evaluation: asyncio.Task[None] | None = None
        self.weights_work = BackgroundWork(self.context, WRITING)
        """Writes and announces the version that was committed last."""
        self._repaired = -1
        """The version that was repaired last (`watch_damage`)."""
        self._committed_at = time.monotonic()
        """When the step before was committed, and the seconds in each state of the process until then."""
        self._totals: dict[str, float] = {}

    async def run(self) -> None:
        """Train until the last step is committed, or until the service must stop."""
        self.context.activity.enter(BOOKKEEPING)
        try:
            await self._resume()
            metrics.RECOVERY_SECONDS.set(time.monotonic() - self.context.started_at)
            metrics.COMMITTED_VERSION.set(self.version)
            while self.version < self.config.steps:
                await self.scheduler.admit(self.version)
                await self._step(self.version)
            await self.weights_work.finish()
            await self._finish_evaluation()
            await self.weights_work.finish()  # during the evaluation, a version may have been written again
            await self.weights_work.give_up()
            await self._save()
            await self._finish()
        except StoppedError:
            await self._stop()
        finally:
            await self.checkpointer.close()

    async def _finish(self) -> None:
        """Record in Redis that the run is over, once it has all of the run's history."""
        last = entry_id_of(self.config.steps - 1)
        while True:
            await self._restore_commits()
            state = self._state() | {"status": FINISHED}
            if await finish_state(self.context.broker, self.context.keys, last, **state):
                return
            # An unexpected entry would keep a commit that Redis has lost from being appended again.
            await self.reconciler.remove_unexpected()

    async def _resume(self) -> None:
        """Announce the version that the run is at; finish what a crash cut off before that."""
        await self.reconciler.take_back_versions(self.version)
        if self.evaluator is not None:
            await self.evaluator.take_back(self.version)
        manifest = await self._announced_weights()
        if manifest is None:
            during = self.context.activity.during
            with during(WRITING):
                manifest = await self._write_weights(await self._compare_weights(), during)
        newest = id_order(await last_id(self.context.broker, self.context.keys.weights))
        # Before newer weights are announced: workers would finish its samples under those.
        if self._must_evaluate(self.version - 1) and newest < id_order(entry_id_of(self.version)):
            self._start_evaluation(self.version - 1)
            await self._finish_evaluation()
        await self._announce(manifest)

    async def _stop(self) -> None:
        """Leave a state to resume from; without a checkpoint, the commits hold every step.

        Weights within a step belong to no version: they are not saved. Workers that are asked to leave too
        may hold tickets that wait for the version that is being written.
        """
        await self.weights_work.give_up(SHUTDOWN_TIMEOUT_S)
        if self._evaluation is not None:
            self._evaluation.cancel()
            await asyncio.wait({self._evaluation})
        await self.runner.thread.call_anywhere(self.runner.policy.zero)
        with contextlib.suppress(StoppedError):
            await self.checkpointer.finish()
        if self.trained_version == self.version and not self.runner.has_begun:
            with contextlib.suppress(StoppedError):
                await self._save()
        log.info("stopped; the run can be resumed", version=self.version)

    async def _step(self, step: int) -> None:
        """Train a step and commit it; what follows the commit is begun, and goes on beside the next step."""
        started_at = time.time()
        if self.runner.thread.takes_turns:  # an engine may have to evaluate first, while it has the GPU
            await self.weights_work.finish()
        async with self._profiled(step):
            result = await self.runner.run(step, self.assembler)
        self.trained_version = step + 1
        # 7 of the step before comes before 5 of this one: at most one committed version is not announced, so
        # a restart has one to write again, from the weights that it has in any case.
        await self.weights_work.finish()
        with self.context.activity.during(WRITING):
            compare_began_at = time.monotonic()
            state = await self._compare_weights()
            compare_s = time.monotonic() - compare_began_at
            usage = await self.runner.thread.call(self.runner.policy.usage)
        commit = self._make_commit(step, result, state, usage, started_at, compare_s)
        await self._commit(commit, result)
        await delete_results(self.context.broker, self.context.keys, Lane.TRAIN, self.scheduler.outstanding)
        await on_disk(self.context, self.recorder.step, step, commit.metrics)
        await self.checkpointer.trim_settled(self.version)
        self.diagnostics.observe(step, commit.metrics)
        # Before anything else is written: others may wait for memory that only a checkpoint frees.
        is_saved = await self.memory.after_step(self._save)
        self.weights_work.start(self._write_and_announce(state), f"weights of version {self.version}")
        observe_step(commit, result)
        metrics.DISK_FREE_SHARE.set(free_share(self.context.run_dir))
        if not is_saved:
            await self._checkpoint_if_due()

    async def _checkpoint_if_due(self) -> None:
        """Take the checkpoint that falls due at this version, if one does; the run's last is taken at its
        end."""
        every = self.config.checkpoint_every
        is_due = every > 0 and self.version % every == 0
        if not is_due or self.version >= self.config.steps:
            return
        if self.reconciler.needs_checkpoint:
            await self._save()
        else:
            await self.checkpointer.begin(self.version, self.assembler.dropped)

    def _make_commit(
        self,
        step: int,
        result: StepResult,
        state: WeightState,
        usage: Usage,
        started_at: float,
        compare_s: float,
    ) -> Commit:
        """The record of a step, with all its metrics and what prompts need to know of it. Its groups are
        still outstanding."""
        dropped = self.assembler.drain_dropped()
        numbers = self._metrics(step, result, len(dropped))
        numbers |= usage_metrics(numbers, result, usage, self.config)
        numbers["weights/compare_s"] = compare_s
        if self.weights.last is not None:
            numbers["weights/encode_s"] = self.weights.last.encode_s  # of the version before
        prompts = self.scheduler.prompts
        outstanding = self.scheduler.outstanding
        trained = [(outstanding[g.ticket], g.rewards) for g in result.groups if g.ticket in outstanding]
        tickets = [group.ticket for group in result.groups] + [ticket for ticket, _, _ in dropped]
        return make_commit(
            step,
            result,
            dropped,
            metrics=numbers,
            digest=state.committed,
            started_at=started_at,
            outcomes=prompts.outcomes(trained),
            sizes=prompts.sizes(tickets),
            processor=self.runner.policy.processor,
        )

    async def _commit(self, commit: Commit, result: StepResult) -> None:
        """Parts 1 to 5 of the order at the top of this file."""
        # 1 comes before anything is sent: of a commit that reached Redis and was lost with its last second,
        # the journal is the only copy.
        await on_disk(self.context, self.journal.append, commit)
        # 2 comes before 4: a checkpoint of the new version must not hold its groups as outstanding, or they
        # would be trained twice.
        self.version = commit.version
        self.join.version = self.version
        self.assembler.settle(result.groups)
        self.scheduler.prompts.take_commit(commit)
        # 3 comes before the check which server answers: if Redis restarts after the check, the new server
        # lacks the mark, or has it and with it all that the step was trained on.
        mark = await self.reconciler.mark()
        if await self.reconciler.check_server():
            await self._save()
        await self.reconciler.restore_lost()
        with metrics.COMMIT_SECONDS.time():
            await self._append(commit, mark)
        # Redis may have restarted right after the append, and lost both commit and records.
        if await self.reconciler.check_server():
            await self._save()

    async def _append(self, commit: Commit, mark: Mark) -> None:
        """Append a commit, and before it those that Redis has lost."""
        # Each time the checkpoint comes first. Redis loses the newest first, so where a commit or the mark is
        # missing, the records of this step may be missing too, and only a checkpoint can replace a replay.
        while True:
            try:
                return await append_commit(self.context.broker, self.context.keys, commit, mark)
            except LostTailError:
                await self._save()
                await self._restore_commits(below=commit.step)
            except MarkLostError:
                await self._save()
                mark = await self.reconciler.mark()

    async def _restore_commits(self, below: int | None = None) -> None:
        broker = self.context.broker
        keys = self.context.keys
        streams = self.context.config.streams
        await restore_commits(broker, keys, self.journal, below, is_trimmed=streams.trims_commits)

    async def _save(self) -> None:
        """Take a checkpoint, and wait until it is durable."""
        await self.checkpointer.save(self.version, self.assembler.dropped)
        self.reconciler.needs_checkpoint = False

    def _metrics(self, step: int, result: StepResult, num_dropped: int) -> dict[str, float]:
        now = time.monotonic()
        step_time_s = now - self._committed_at
        self._committed_at = now
        threshold = self.config.algorithm.success_threshold
        numbers = step_metrics(step, result, num_dropped, step_time_s, threshold)
        numbers |= self.scheduler.prompts.metrics()
        numbers["trainer_idle_share"] = self.context.activity.idle_share()
        # Seconds in each state since the commit before: where the time of the step went.
        before = self._totals
        self._totals = self.context.activity.totals()
        spent = {state: seconds - before.get(state, 0.0) for state, seconds in self._totals.items()}
        total_s = sum(spent.values())
        waited_s = sum(s for state, s in spent.items() if state.startswith(WAIT))
        numbers |= {f"time/{state.replace(':', '_')}_s": s for state, s in spent.items() if s > 0}
        numbers["time/wait_share"] = waited_s / total_s if total_s else 0.0
        if step == 0:
            # In the first step engines start: that time does not count as idle.
            self.context.activity.reset()
            self._totals = {}
        return numbers

    @contextlib.asynccontextmanager
    async def _profiled(self, step: int) -> AsyncIterator[None]:
        """Profile the step's calls of the policy, where its folder of profiles exists."""
        folder = self.context.run_dir / PROFILES / f"step-{step}"
        thread = self.runner.thread
        if not await self.context.outside.run(os.path.isdir, folder):
            yield
            return
        await thread.call_anywhere(self.runner.policy.profile, folder)
        try:
            yield
        finally:
            await thread.call_anywhere(self.runner.policy.profile, None)

    async def _compare_weights(self) -> WeightState:
        """Compare weights: the part of writing a version that needs the policy's thread."""
        with metrics.WEIGHTS_COMPARE_SECONDS.time():
            return await self.runner.thread.call(self.runner.policy.compare_weights)

    async def _write_and_announce(self, state: WeightState) -> None:
        """Parts 6 and 7, of the version that was just committed."""
        manifest = await self._write_weights(state, self.weights_work.during)
        # Workers that get newer weights would finish the samples of that evaluation under these.
        await self._finish_evaluation(self.weights_work.during)
        await self._announce(manifest)

    async def _write_weights(self, state: WeightState, during: During) -> WeightManifest:
        """Write the current version, and remove old ones."""
        begin = partial(self.weights.begin, self.version, self.runner.policy, state)
        with metrics.WEIGHTS_WRITE_SECONDS.time():
            manifest = await self._begin_and_finish(begin, during)
        metrics.WEIGHTS_BYTES.set(manifest.num_bytes)
        metrics.WEIGHTS_SHARE_CHANGED.set(manifest.share_changed)
        keep = self.config.keep_weights
        in_use = self.best.in_use if self.best else ()
        await self.context.outside.run(self.weights.prune, keep, in_use, manifest.version)
        return manifest

    async def _begin_and_finish(
        self, begin: Callable[[], BegunVersion | WeightManifest], during: During
    ) -> WeightManifest:
        """Write a version; begun again while the disk takes none. The policy's thread only calls `begin`, and
        then does other work beside the writing."""

        async def write() -> WeightManifest:
            begun = await self.runner.thread.call(begin)
            # The step's last call that needs the GPU: where it is used in turn, others may have it now.
            self.runner.thread.release()
            return await self.context.outside.run(self.weights.finish, begun)

        return await until_stored(self.context, write, during)

    async def _announce(self, manifest: WeightManifest) -> None:
        """Announce a version, and start its evaluation where one is due."""
        await self.reconciler.announce(manifest)
        if self._must_evaluate(manifest.version):
            self._start_evaluation(manifest.version)
        await self._report(status=RUNNING)

    async def watch_damage(self) -> None:
        """Write a version again, in full, where rollout workers find its files damaged; for ever.

        Every worker that needs a damaged delta refuses it, and tickets of later steps wait for that version:
        the run would stand still. The policy has these weights until the next update; after it, the next
        version is written in full. Each version is repaired at most once: if workers find it damaged again,
        its files are not the cause.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            manifest = self.reconciler.manifest
            if manifest is not None and manifest.version > self._repaired:
                beats = await read_heartbeats(self.context.broker, self.context.keys, ("rollout",))
                workers = [
                    beat.name for beat in beats if beat.counts.get(DAMAGED_VERSION) == manifest.version
                ]
                if workers:
                    self._repair(manifest, workers[0])

    def _repair(self, manifest: WeightManifest, worker: str) -> None:
        """Begin the repair, where the trainer still is at that version. Nothing is awaited here: the step
        could go on between these checks."""
        version = manifest.version
        has_moved = self.runner.has_begun
        is_current = self.trained_version == self.version == version
        if not (is_current and self.reconciler.manifest is manifest and self.weights_work.is_done):
            return
        self._repaired = version
        self.weights.distrust()
        log.error(DAMAGED, version=version, worker=worker, written_in_full=version + has_moved)
        if not has_moved:
            # The policy's thread takes calls in order: this comes before the update that moves the weights.
            self.weights_work.start(self._write_again(manifest), f"version {version}, again")

    async def _write_again(self, manifest: WeightManifest) -> None:
        begin = partial(self.weights.begin_again, manifest, self.runner.policy)
        await self.reconciler.announce(await self._begin_and_finish(begin, self.weights_work.during))

    async def _announced_weights(self) -> WeightManifest | None:
        """The manifest of the current version, where it was announced and its files are whole. Where a replay
        gave other weights, workers keep the announced ones: a version is not announced with two contents."""
        newest = await read_newest(self.context.broker, self.context.keys.weights, WeightManifest)
        if newest is None or newest.message.version != self.version:
            return None
        manifest = await self.context.outside.run(self.weights.standing, self.version, newest.message.digest)
        self.weights.last = manifest
        return manifest

    def _must_evaluate(self, version: int) -> bool:
        """Whether an evaluation of `version` is due, and not on record for every dataset."""
        if self.evaluator is None or version < 0:
            return False
        if not self.evaluator.is_due(version, self.config.steps):
            return False
        names = {name for name, _ in self.evaluator.prompts}
        return not all(self.recorder.has_evaluation(version, name) for name in names)

    def _start_evaluation(self, version: int) -> None:
        assert self.evaluator is not None, "`_must_evaluate` comes first"
        self._evaluation = self.context.start(self._evaluate(version, self.evaluator), "evaluation")

    async def _evaluate(self, version: int, evaluator: "Evaluator") -> None:
        results = await evaluator.evaluate(version)
        for dataset, numbers in results.items():
            reason = evaluator.reasons.get(dataset, "")
            await on_disk(self.context, self.recorder.evaluation, version, dataset, numbers, reason)
        await self._report()
        if self.best is not None:
            await on_disk(self.context, self.best.consider, version, results)
        # Only when results are safe: what is trimmed cannot be evaluated again. Where commits may be lost and
        # no checkpoint covers them yet, a restart would go back behind this version and evaluate it again.
        await on_disk(self.context, self.recorder.sync)
        if not await self.reconciler.check_server():
            await evaluator.trim(version)

    async def _finish_evaluation(self, during: During | None = None) -> None:
        """Wait for the evaluation in progress before newer weights are announced. Raises StoppedError: the
        service must stop first."""
        if self._evaluation is None:
            return
        with (during or self.context.activity.during)("wait:evaluation"):
            while not self._evaluation.done():
                waiting = asyncio.wait({self._evaluation}, timeout=QUIET_S)
                if await self.context.unless_stopping(waiting) is None:
                    raise StoppedError
                # Its workers may wait for a version whose announcement Redis has lost.
                await self.reconciler.restore_lost()
        # A stop while it waits for the disk is no failure, and ends the trainer as well.
        if self.context.failure is not None or self._evaluation.exception() is not None:
            raise StoppedError
        self._evaluation = None

    async def _report(self, **values: object) -> None:
        await update_state(self.context.broker, self.context.keys, **(self._state() | values))

    def _state(self) -> dict[str, object]:
        return {
            "version": self.version,
            "steps": self.config.steps,
            "tickets_issued": self.scheduler.next_ticket,
            "trajectories_seen": self.join.num_trajectories,
            "trainer_idle_share": self.context.activity.idle_share(),
            "evaluations": self.recorder.evaluations,
            "warnings": self.diagnostics.as_state(),
            "best": self.best.as_state() if self.best else None,
        }
