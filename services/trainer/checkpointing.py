"""Saves checkpoints, and trims the streams below what the oldest kept one needs.

Guarantees: an entry goes only when every whole checkpoint on the disk can do without it, and not before there
are `keep_checkpoints` of them; checkpoints of earlier processes count too.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

import structlog

from common import metrics
from common.history.selection import StreamName
from common.service import ServiceContext
from common.streams import entry_id_of
from services.trainer.checkpoint import CheckpointStore, TrainerState
from services.trainer.collector import Dropped
from services.trainer.intake import SCORES, TRAJECTORIES, Intake
from services.trainer.policy import Policy
from services.trainer.policy_thread import PolicyThread
from services.trainer.recorder import Recorder
from services.trainer.scheduler import Scheduler
from services.trainer.storage import until_stored
from services.trainer.trimming import Trimmer

log = structlog.get_logger(__name__)


class Checkpointer:
    """Takes the state of the trainer's parts between two steps."""

    def __init__(
        self,
        context: ServiceContext,
        store: CheckpointStore,
        policy: Policy,
        thread: PolicyThread,
        scheduler: Scheduler,
        intake: Intake,
        recorder: Recorder,
        version: int,
        trimmer: Trimmer,
    ) -> None:
        """`version` is that of the checkpoint which was restored, 0 where there was none."""
        self.context, self.store = context, store
        self.policy, self.thread = policy, thread
        self.scheduler, self.intake, self.recorder = scheduler, intake, recorder
        self.trimmer = trimmer
        # Those above the restored one are not whole; the store removes them when it saves.
        known = [state for state in store.states() if state.version <= version]
        self._kept: deque[TrainerState] = deque(known, maxlen=context.config.trainer.keep_checkpoints)
        self._changing = asyncio.Lock()

    async def save(self, version: int, dropped: Sequence[Dropped]) -> None:
        """Write the checkpoint of `version`, then let go of what no kept checkpoint needs.

        `dropped` is what the next commit will have to tell.
        """
        state = TrainerState(
            version=version,
            positions=self.intake.positions(),
            scheduler=self.scheduler.state(),
            intake={
                "high_water": self.intake.high_water(),
                "trails": {
                    stream: [list(rung) for rung in rungs] for stream, rungs in self.intake.trails().items()
                },
                "dropped": [list(item) for item in dropped],
            },
            data={"fingerprint": self.scheduler.prompts.fingerprint},
            counters={"trajectories": self.intake.num_trajectories},
        )
        async with self._changing:
            await self._save(state)

    async def keep_newest_only(self) -> None:
        """Give up all checkpoints but the newest whole one, and let go of what only they needed."""
        async with self._changing:
            if not self._kept:
                return
            newest = self._kept[-1]
            if len(self._kept) > 1:
                if not await asyncio.to_thread(self.store.keep_only, newest.version):
                    return
                self._kept = deque([newest], self._kept.maxlen)
                log.warning("gave up older checkpoints to make room in Redis", kept=newest.version)
            await self._trim(newest, is_urgent=True)

    async def _save(self, state: TrainerState) -> None:
        with self.context.activity.during("checkpoint"), metrics.CHECKPOINT_SECONDS.time():
            await until_stored(self.context, partial(asyncio.to_thread, self.recorder.sync))
            write = partial(self.thread.call, self.store.save, state, self.policy.save_state)
            await until_stored(self.context, write)
        self._kept.clear()
        self._kept.extend(self.store.kept)
        if self.context.config.streams.trim and len(self._kept) == self._kept.maxlen:
            await self._trim(self._kept[0])

    async def _trim(self, oldest: TrainerState, is_urgent: bool = False) -> None:
        """Remove entries below the positions of the oldest checkpoint that could be restored."""
        outstanding = [item[0] for item in oldest.scheduler["outstanding"]]
        first_ticket = min(outstanding, default=oldest.scheduler["next_ticket"])
        keep_from = max(0, oldest.version - self.context.config.trainer.keep_weights)
        below = {
            StreamName.TRAJECTORIES: oldest.positions[TRAJECTORIES],
            StreamName.SCORES: oldest.positions[SCORES],
            StreamName.PROMPTS: entry_id_of(first_ticket),
            StreamName.WEIGHTS: entry_id_of(keep_from),
        }
        await self.trimmer.let_go(below, is_urgent)
