"""The rollout service: one engine, one weight follower, one worker per lane."""

import asyncio
import time

from tidemill.common.errors import EngineError
from tidemill.common.process.activity import LOAD, WAIT_ENVIRONMENT, WAIT_REDIS, WAIT_START, Activity
from tidemill.common.process.heartbeats import DAMAGED_VERSION, FAILURES, Heartbeat
from tidemill.common.process.service import ServiceContext
from tidemill.common.run.state import UID, read_state
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Lane
from tidemill.services.rollout.containers.reaper import Reaper
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Engine
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.sessions.player import Player
from tidemill.services.rollout.weight_follower import WeightFollower
from tidemill.services.rollout.worker import RolloutWorker

SAMPLE_S = 0.02
WATCHES_PER_STALL = 10
UID_PAUSE_S = 0.5


async def serve(context: ServiceContext) -> None:
    """Run until the context says stop; the engine is closed last."""
    engine = build_engine(context.config, context.name)
    with context.activity.during(LOAD, "starting the engine"):
        await engine.start()
    player = build_player(context.config, engine.decode, engine.read, run_dir=context.run_dir)
    try:
        with context.activity.during(LOAD, "loading the environment"):
            await player.start()
        if player.containers.is_on:
            with context.activity.during(WAIT_START, "the trainer has not registered the run yet"):
                uid = await context.unless_stopping(_wait_for_uid(context))
            # None where it has to stop: no session begins then.
            player.containers.run_uid = uid or ""
        await _work(context, engine, player)
    finally:
        # The player first: its sessions ask the engine, and would fail as if the engine had failed.
        await player.close()
        await player.containers.close()
        await engine.close()
    context.raise_failure()


async def _wait_for_uid(context: ServiceContext) -> str:
    """The run's uid. Its trainer writes it before it issues tickets, but workers may start first."""
    while True:
        uid = (await read_state(context.broker, context.keys)).get(UID)
        if uid:
            return str(uid)
        await asyncio.sleep(UID_PAUSE_S)


async def _work(context: ServiceContext, engine: Engine, player: Player) -> None:
    follower = WeightFollower(context, engine)
    workers = [RolloutWorker(context, lane, engine, follower, player) for lane in (Lane.EVAL, Lane.TRAIN)]

    def report(beat: Heartbeat) -> None:
        beat.version = engine.version
        beat.counts["requests"] = engine.num_running
        if update := follower.last_update:
            beat.counts |= {"weights_load_s": update.load_s, "weights_pause_s": update.paused_s}
        if follower.damaged_version >= 0:
            beat.counts[DAMAGED_VERSION] = follower.damaged_version
        if follower.num_mismatches:
            beat.counts["weight_mismatches"] = follower.num_mismatches
        for kind, count in player.num_faults.items():
            beat.counts[f"{FAILURES}environment:{kind}"] = count
        beat.failures += player.log.failures
        for worker in workers:
            worker.report(beat)

    context.reporters.append(report)
    background = [
        context.start(follower.run(), "weight follower"),
        context.start(_watch_activity(context.activity, engine, follower, workers), "activity"),
        context.start(_watch_progress(context, engine, workers), "watchdog"),
    ]
    if player.containers.is_on:
        context.shortage.checks.append(player.containers.find_fault)
        background.append(context.start(Reaper(context, player.containers).run(), "reaper of containers"))
    try:
        async with asyncio.TaskGroup() as lanes:
            for worker in workers:
                lanes.create_task(worker.run())
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


async def _watch_progress(context: ServiceContext, engine: Engine, workers: list[RolloutWorker]) -> None:
    """End the process when the engine has requests and finishes none for `rollout.stall_s`: it hangs."""
    stall_s = context.config.rollout.stall_s
    done = -1
    since = time.monotonic()
    while True:
        await asyncio.sleep(stall_s / WATCHES_PER_STALL)
        finished = sum(worker.num_turns for worker in workers)
        if finished != done or not engine.num_running:
            done = finished
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise EngineError(
                f"the engine has {engine.num_running} requests and finished none of them for {stall_s:g} s. "
                "Raise rollout.stall_s if one completion may take that long."
            )


def _state_of(engine: Engine, follower: WeightFollower, workers: list[RolloutWorker]) -> tuple[str, str]:
    """State of the worker and a detail: it generates, or what all of its groups wait for."""
    if engine.num_running:
        return "generate", ""
    if follower.num_waiting:
        return "wait:weights", "groups are held until their version arrives"
    if any(worker.num_wanted for worker in workers):
        return "wait:device", "another process has the GPU"
    if any(worker.num_playing for worker in workers):
        return WAIT_ENVIRONMENT, "environments have not answered yet"
    if any(worker.running for worker in workers):
        return WAIT_REDIS, "samples are being published"
    return "wait:tickets", "the trainer has issued no more"


async def _watch_activity(
    activity: Activity, engine: Engine, follower: WeightFollower, workers: list[RolloutWorker]
) -> None:
    """Record the state of this process every `SAMPLE_S`: it generates, or what it waits for.

    Idle time counts from the first request on: before it, there was no work.
    """
    has_generated = False
    while True:
        if engine.num_running and not has_generated:
            has_generated = True
            activity.reset()
        activity.enter(*_state_of(engine, follower, workers))
        metrics.REQUESTS_RUNNING.set(engine.num_running)
        await asyncio.sleep(SAMPLE_S)
