"""The trainer service: builds the parts, recovers, and trains."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import structlog

from tidemill.common.config.diagnostics import HealthyRange
from tidemill.common.files import locked
from tidemill.common.process.checks import check_loggers
from tidemill.common.process.gpu_sharing import GpuLock, lock_files
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.run.state import METRICS_FILE, read_records, read_state
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import (
    Prompt,
    load_eval_prompts,
    load_tokenizer,
    load_training_prompts,
)
from tidemill.services.trainer.batch.reconciler import Reconciler, Registration, RunStreams, next_term
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.batch.stream_join import STREAMS, StreamJoin
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.durable.checkpointing import Checkpointer, Trimmer
from tidemill.services.trainer.durable.commits import CommitJournal
from tidemill.services.trainer.durable.disk_retry import on_disk, until_stored
from tidemill.services.trainer.durable.memory_watch import MemoryWatch
from tidemill.services.trainer.durable.recovery import Replayer, restore_checkpoint
from tidemill.services.trainer.evaluation import Evaluator
from tidemill.services.trainer.groups.group_filter import GroupFilter
from tidemill.services.trainer.metrics.diagnostics import Diagnostics
from tidemill.services.trainer.metrics.recorder import TENSORBOARD, Recorder, rebuild
from tidemill.services.trainer.metrics.trackers import TRACKERS, Sender, TrackedRun
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.policy import PolicyThread
from tidemill.services.trainer.step import StepRunner
from tidemill.services.trainer.trainer import Durability, Outputs, Trainer
from tidemill.services.trainer.weight_repair import WeightRepair
from tidemill.services.trainer.weights.best_version import BestVersion
from tidemill.services.trainer.weights.publisher import build_publisher
from tidemill.services.trainer.weights.store import WeightStore

log = structlog.get_logger(__name__)

ANOTHER_TRAINER = (
    "another trainer works in the folder of run {}. One run has one trainer: stop the other one first, or "
    "give this one a run id of its own."
)


async def serve(context: ServiceContext) -> None:
    """Run the trainer to its last step, or until the context says stop. Raises LockedError: another trainer
    works in this run's folder."""
    check_loggers(context.config.trainer.loggers)
    async with AsyncExitStack() as held:

        async def hold() -> None:
            lock = locked(context.run_dir / "trainer.lock", ANOTHER_TRAINER.format(context.keys.run_id))
            held.enter_context(lock)

        await until_stored(context, hold)
        await _train(context)


async def _train(context: ServiceContext) -> None:
    context.activity.enter("load", "model and data")
    prompts, evaluation = await asyncio.to_thread(_load_data, context)
    streams = _make_streams(context, prompts)
    trimmer = Trimmer(context, streams.reconciler)
    evaluator = Evaluator(context, evaluation, trimmer)
    thread = PolicyThread()
    async with AsyncExitStack() as sharing:
        if context.config.rollout.trainer_gpus == "turns":
            await sharing.enter_async_context(thread.taking_turns(GpuLock(lock_files()), context.activity))
        policy = thread.policy = await thread.call(open_policy, context.config, context.run_dir)
        try:
            runner = StepRunner(context, policy, thread, GroupFilter(context.config))
            await _train_policy(context, runner, streams, evaluator, trimmer)
        finally:
            if isinstance(policy, ShardedPolicy):
                await thread.call_anywhere(policy.close)


def _make_streams(context: ServiceContext, prompts: PromptPlan) -> RunStreams:
    broker, keys = context.broker, context.keys
    join = StreamJoin(broker, keys, context.config.trainer.group_size)
    scheduler = Scheduler(broker, keys, context.config, prompts, join.expect)
    return RunStreams(scheduler, join, Reconciler(broker, keys, scheduler))


async def _train_policy(
    context: ServiceContext, runner: StepRunner, streams: RunStreams, evaluator: Evaluator, trimmer: Trimmer
) -> None:
    join, reconciler = streams.join, streams.reconciler
    keep = context.config.trainer.keep_checkpoints
    store = await on_disk(context, CheckpointStore, context.run_dir, keep)
    journal = await on_disk(context, CommitJournal, context.run_dir)
    reconciler.term = await on_disk(context, next_term, context.run_dir)
    reconciler.registration = Registration(context)
    await until_stored(context, reconciler.registration.begin)
    replayer = Replayer(context, runner, streams, journal)
    can_start_over = await replayer.archived.begins_at_start()
    restored, dropped, needed = await runner.thread.call(
        restore_checkpoint, store, runner.policy, streams, can_start_over
    )
    commits = await replayer.take_over(restored, dropped, needed)
    version = join.version = restored + len(commits)
    await until_stored(context, partial(_rebuild_records, context, restored, version, journal))
    has_board = TENSORBOARD in context.config.trainer.loggers
    recorder = await on_disk(context, Recorder, context.run_dir, has_board, version)
    with recorder:
        for sender in await asyncio.to_thread(_open_loggers, context):
            recorder.attach(sender)
        background = [context.start(join.read(name), f"reader of {name}") for name in STREAMS]
        background.append(context.start(reconciler.watch(), "watch over the run's mark"))
        try:
            await replayer.replay(commits, recorder)
            assembler = BatchAssembler(context, streams, runner.group_filter, runner.precompute)
            assembler.dropped += replayer.pending_drops
            assembler.limit.restore([reason for _, _, reason in assembler.dropped])
            for ticket in replayer.skipped:
                await assembler.drop(ticket, "lost: its ticket", version)
            checkpointer = Checkpointer(context, store, runner, streams, recorder, trimmer, restored)
            memory = MemoryWatch(context, checkpointer)
            background.append(context.start(memory.watch(), "memory watch"))
            outputs = await on_disk(context, _resume_outputs, context, recorder)
            durability = Durability(journal, checkpointer, memory)
            trainer = Trainer(context, version, assembler, runner, evaluator, durability, outputs)
            context.reporters.append(lambda beat: _report(beat, trainer))
            background.append(
                context.start(WeightRepair(context, trainer).watch(), "watch over damaged weights")
            )
            await trainer.run()
        except StoppedError:
            log.info("stopped while replaying commits; nothing was changed")
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await trimmer.close()
    context.raise_failure()


async def _rebuild_records(context: ServiceContext, saved: int, version: int, journal: CommitJournal) -> None:
    """Before the recorder opens the file and trackers are sent what is on it."""
    state = await read_state(context.broker, context.keys)

    def commit_of(step: int) -> Commit | None:
        return journal.read(step) if step in journal.steps else None

    evaluations = [item for item in state.get("evaluations") or [] if item["version"] <= version]
    await asyncio.to_thread(rebuild, context.run_dir, saved, version, commit_of, evaluations)


def _open_loggers(context: ServiceContext) -> list[Sender]:
    """After the recorder has cut its file back: what is on record there and not sent is sent first."""
    trainer, records = context.config.trainer, read_records(context.run_dir / METRICS_FILE)
    config = context.config.model_dump(mode="json", exclude={"reward"})  # addresses of judges may hold keys
    return [
        Sender(
            name,
            TRACKERS[name],
            TrackedRun(context.keys.run_id, context.run_dir, trainer.logger_project, config, {}),
            records,
        )
        for name in trainer.loggers
        if name != TENSORBOARD
    ]


def _resume_outputs(context: ServiceContext, recorder: Recorder) -> Outputs:
    trainer, records = context.config.trainer, list(read_records(context.run_dir / METRICS_FILE))
    ranges = trainer.diagnostics
    if trainer.policy == "simulated":
        ranges = ranges | {"entropy": HealthyRange()}  # delays have none
    best = BestVersion(context.run_dir, trainer.evaluation.keep_best, records)
    publisher = build_publisher(context.config.weights.url, context.keys.run_id)
    weights = WeightStore(context.run_dir, context.config.weights, publisher)
    return Outputs(weights, best, recorder, Diagnostics(ranges).resume(records))


def _report(beat: Heartbeat, trainer: Trainer) -> None:
    beat.version = trainer.version
    beat.counts["outstanding"] = len(trainer.scheduler.outstanding)
    beat.counts["complete"] = len(trainer.join.complete)
    if last := trainer.outputs.weights.last:
        beat.counts |= {
            "weights_bytes": last.num_bytes,
            "weights_changed": last.share_changed,
            "weights_encode_s": last.encode_s,
        }
    seconds = trainer.durability.checkpointer.seconds
    beat.counts |= {f"checkpoint_{name}_s": value for name, value in seconds.items()}


def _load_data(context: ServiceContext) -> tuple[PromptPlan, dict[str, list[Prompt]]]:
    config = context.config
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_training_prompts(config.data, tokenizer, config.seed)
    evaluation = load_eval_prompts(config.data, tokenizer, config.trainer.evaluation.max_prompts)
    return PromptPlan(prompts, config), evaluation
