"""`tidemill replay step`: a session, its comparison, and where asked for the what-if and the tensors."""

import argparse
import time
from collections.abc import Sequence

from common.config import RunConfig
from common.history import History
from services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from services.trainer.policy.loading import open_policy
from services.trainer.policy.policy import Policy, PolicyState, PolicyThread
from services.trainer.replay.comparison import compare_step, weight_difference
from services.trainer.replay.session import ReplayedStep, Say, Session
from services.trainer.replay.torch_dump import write_dump
from services.trainer.replay.what_if import WhatIf, copied_state


class StepReplay:
    """Replays steps and says what came out, event by event."""

    def __init__(
        self,
        history: History,
        config: RunConfig,
        changed: RunConfig | None,
        options: argparse.Namespace,
        say: Say,
    ) -> None:
        """`changed` is the config of a what-if; `options` are those of the command line."""
        self.history, self.config, self.options, self.say = history, config, options, say
        self.thread = PolicyThread()
        self.what_if = WhatIf(config, changed, self.thread) if changed else None
        self._start: PolicyState | None = None

    async def run(self, steps: Sequence[int]) -> bool:
        """Replay the steps; returns whether all came out as recorded."""
        policy = await self.thread.call(open_policy, self.config)
        try:
            return await self._run(policy, steps)
        finally:
            if isinstance(policy, ShardedPolicy):
                await self.thread.call(policy.close)

    async def _run(self, policy: Policy, steps: Sequence[int]) -> bool:
        session = Session(self.history, self.config, self.options.run_dir, policy, self.thread, self.say)

        async def before(_step: int) -> None:
            if self.what_if is not None:
                await self.what_if.remember(policy)
            if self.options.with_weights:
                self._start = await self.thread.call(copied_state, policy)

        is_equal, started_at = True, time.monotonic()
        async for replayed in session.steps(steps, before):
            result = compare_step(replayed)
            is_equal = is_equal and result["equal"]
            result["first_difference"] = session.first_difference
            result["from_version"] = session.from_version
            if not result["digest"]["equal"]:
                result["weights"] = await self.thread.call(
                    weight_difference, policy, self.options.run_dir, replayed.commit
                )
            if self.what_if is not None:
                result["what_if"] = await self.what_if.train(replayed.commit, replayed.groups, policy)
            if self.options.to_torch:
                result["file"] = self._dump(replayed)
            self.say({"kind": "result", "seconds": time.monotonic() - started_at, **result})
        return is_equal

    def _dump(self, replayed: ReplayedStep) -> dict[str, str | int]:
        path = self.options.to_torch
        return {"path": str(path), "num_bytes": write_dump(path, self.config, replayed, self._start)}
