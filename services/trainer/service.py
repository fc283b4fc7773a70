"""The trainer service: builds the parts, recovers, and trains."""

import asyncio
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tidemill.common.config import RunConfig
from tidemill.common.config.diagnostics import HealthyRange
from tidemill.common.files import locked
from tidemill.common.process.activity import LOAD
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.run.state import EVALUATION, METRICS_FILE, Record, read_records, read_state
from tidemill.common.streams import START, last_id
from tidemill.common.telemetry.trackers import check_loggers
from tidemill.common.wire.messages import Lane
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import (
    Prompt,
    PromptSource,
    load_eval_prompts,
    load_tokenizer,
    load_training_prompts,
)
from tidemill.services.trainer.batch.reconciler import Reconciler, RunStreams
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.batch.stream_join import STREAMS, StreamJoin
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.durable.checkpointing import Checkpointer
from tidemill.services.trainer.durable.commits import CommitJournal
from tidemill.services.trainer.durable.memory_watch import MemoryWatch
from tidemill.services.trainer.durable.recovery import Replayer
from tidemill.services.trainer.durable.trimming import Trimmer
from tidemill.services.trainer.durable.waiting import on_disk, until_stored
from tidemill.services.trainer.metrics.diagnostics import Diagnostics
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.policy.loading import closer_of, open_policy
from tidemill.services.trainer.policy.policy import PolicyThread
from tidemill.services.trainer.step import StepRunner
from tidemill.services.trainer.trainer import Trainer
from tidemill.services.trainer.weights.store import Publisher, WeightStore

if TYPE_CHECKING:
    from tidemill.services.trainer.evaluation import Evaluator
    from tidemill.services.trainer.weights.best_version import BestVersion

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
    for warning in context.config.warnings:
        log.warning(warning)
    context.activity.enter(LOAD, "model and data")
    prompts, evaluation = await asyncio.to_thread(_load_data, context)
    broker = context.broker
    keys = context.keys
    if context.config.images is not None and broker.claims is not None:
        # A run of text imports nothing of it.
        from tidemill.services.trainer.groups.pictures import watch_pictures

        await asyncio.to_thread(watch_pictures, broker.claims, context.config, context.run_dir)
    join = StreamJoin(broker, keys)
    scheduler = Scheduler(broker, keys, context.config, prompts, join.expect)
    streams = RunStreams(scheduler, join, Reconciler(broker, keys, scheduler))
    trimmer = Trimmer(context, streams.reconciler)
    evaluator = await open_evaluator(context, evaluation, trimmer)
    thread = PolicyThread()
    async with AsyncExitStack() as sharing:
        if context.config.rollout.trainer_gpus == "turns":
            from tidemill.common.process.gpu_sharing import GpuLock, lock_files

            await sharing.enter_async_context(thread.taking_turns(GpuLock(lock_files()), context.activity))
        policy = await thread.call(open_policy, context.config, context.run_dir)
        thread.policy = policy
        try:
            runner = StepRunner(context.config, policy, thread, context.activity, context.stopping)
            await _train_policy(context, runner, streams, evaluator, trimmer)
        finally:
            close = closer_of(policy)
            if close is not None:
                await thread.call_anywhere(close)


async def _train_policy(
    context: ServiceContext,
    runner: StepRunner,
    streams: RunStreams,
    evaluator: "Evaluator | None",
    trimmer: Trimmer,
) -> None:
    """Recover, in the order that `recovery.py` gives, and train."""
    join = streams.join
    reconciler = streams.reconciler
    config = context.config.trainer
    store = await on_disk(context, CheckpointStore, context.run_dir, config.keep_checkpoints)
    journal = await on_disk(context, CommitJournal, context.run_dir)
    await until_stored(context, lambda: reconciler.begin(context))
    replayer = Replayer(context, runner, streams, journal)
    commits = await replayer.take_over(store)
    version = replayer.version
    join.version = version
    evaluations = (await read_state(context.broker, context.keys)).get("evaluations") or []
    # Before trackers open: they first send records that were not sent yet.
    recorder = await on_disk(context, Recorder, context.run_dir, version, journal.find, evaluations)
    with closing(recorder):
        await asyncio.to_thread(_attach_loggers, context, recorder)
        background = [context.start(join.read(name), f"reader of {name}") for name in STREAMS]
        background.append(context.start(reconciler.watch(), "watch over the run's mark"))
        try:
            await replayer.replay(commits, recorder)
            assembler = BatchAssembler(context, streams, runner.group_filter, runner.precompute)
            assembler.dropped += replayer.pending_drops
            assembler.limit.begin_step(reason for _, _, reason in assembler.dropped)
            for ticket in replayer.skipped:
                await assembler.drop(ticket, "lost: its ticket", version)
            checkpointer = Checkpointer(context, store, runner, streams, recorder, trimmer)
            memory = MemoryWatch(context, checkpointer)
            background.append(context.start(memory.watch(), "memory watch"))
            weights, best, diagnostics = await on_disk(context, _resume_outputs, context)
            trainer = Trainer(
                context=context,
                version=version,
                assembler=assembler,
                runner=runner,
                evaluator=evaluator,
                journal=journal,
                checkpointer=checkpointer,
                memory=memory,
                weights=weights,
                best=best,
                recorder=recorder,
                diagnostics=diagnostics,
            )
            context.reporters.append(lambda beat: _report(beat, trainer))
            background.append(context.start(trainer.watch_damage(), "watch over damaged weights"))
            await trainer.run()
        except StoppedError:
            log.info("stopped while replaying commits; nothing was changed")
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await trimmer.close()
    context.raise_failure()


async def open_evaluator(
    context: ServiceContext, sets: dict[str, list[Prompt]], trimmer: Trimmer
) -> "Evaluator | None":
    """None where the run has no evaluation sets, and never had any."""
    # Of sets that it had before, tickets may be left, which the evaluator takes back.
    if not sets and await last_id(context.broker, context.keys.prompts(Lane.EVAL)) == START:
        return None
    from tidemill.services.trainer.evaluation import Evaluator

    return Evaluator(context, sets, trimmer)


def _attach_loggers(context: ServiceContext, recorder: Recorder) -> None:
    trainer = context.config.trainer
    if not trainer.loggers:
        return
    from tidemill.services.trainer.metrics.trackers import TRACKERS, Sender, TrackedRun

    config = context.config.model_dump(mode="json", exclude={"reward"})  # addresses of judges may hold keys
    for name in trainer.loggers:
        run = TrackedRun(context.keys.run_id, context.run_dir, trainer.logger_project, config, {})
        recorder.attach(Sender(name, TRACKERS[name], run))


def _resume_outputs(context: ServiceContext) -> "tuple[WeightStore, BestVersion | None, Diagnostics]":
    """The parts whose state follows from the records of earlier steps and evaluations."""
    trainer = context.config.trainer
    records = read_records(context.run_dir / METRICS_FILE)
    ranges = trainer.diagnostics
    if trainer.policy == "simulated":
        ranges = ranges | {"entropy": HealthyRange()}  # a simulated policy has none
    best = find_best_version(context.run_dir, context.config, records)
    publisher: Publisher | None = None
    address = context.config.weights.address
    if address:
        from tidemill.services.trainer.weights.object_publisher import open_publisher

        publisher = open_publisher(address, context.keys.run_id)
    weights = WeightStore(context.run_dir, context.config.weights, publisher)
    return weights, best, Diagnostics(ranges).resume(records)


def find_best_version(run_dir: Path, config: RunConfig, records: list[Record]) -> "BestVersion | None":
    """None where the run has no evaluation sets, and no evaluation on record."""
    if not config.data.eval and not any(record["kind"] == EVALUATION for record in records):
        return None
    from tidemill.services.trainer.weights.best_version import BestVersion

    return BestVersion(run_dir, config.trainer.evaluation.keep_best, records)


def _report(beat: Heartbeat, trainer: Trainer) -> None:
    beat.version = trainer.version
    beat.failures += trainer.assembler.failures.failures
    beat.counts["outstanding"] = len(trainer.scheduler.outstanding)
    beat.counts["complete"] = len(trainer.join.complete)
    last = trainer.weights.last
    if last:
        beat.counts |= {
            "weights_bytes": last.num_bytes,
            "weights_changed": last.share_changed,
            "weights_encode_s": last.encode_s,
        }
    seconds = trainer.checkpointer.seconds
    beat.counts |= {f"checkpoint_{name}_s": value for name, value in seconds.items()}


def _load_data(context: ServiceContext) -> tuple[PromptPlan, dict[str, list[Prompt]]]:
    config = context.config
    tokenizer = load_tokenizer(config.model.path)
    pictures = None
    if config.images is not None:
        # A run of text imports nothing of it.
        from tidemill.services.trainer.batch.row_pictures import RowPictures

        pictures = RowPictures.of_run(config, context.run_dir, tokenizer)
    prompts = load_training_prompts(config.data, tokenizer, config.seed, pictures)
    evaluation = load_eval_prompts(config.data, tokenizer, config.trainer.evaluation.max_prompts, pictures)
    demonstrations: list[PromptSource] = []
    if config.data.demonstrations:
        from tidemill.services.trainer.batch.demonstrations import load_demonstrations

        demonstrations = load_demonstrations(config.data, tokenizer, config.seed, config.model)
    return PromptPlan(prompts, config, demonstrations), evaluation
