"""The whole trainer in the test's process, with workers that answer at once: run, stopped, crashed."""

import asyncio
from typing import Any

import pytest

from tests.support.training import assert_nothing_lost, messages, num_commits
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.service import serve

GROUPS, SIZE = 2, 2
"""Groups of a step, and samples of a group, in the contexts that `make` makes."""


async def run(context: ServiceContext) -> None:
    await asyncio.wait_for(serve(context), 120)


async def crash_after_commit(context: ServiceContext, step: int) -> None:
    """Run a trainer that dies when it has committed `step`, before it does anything else."""
    append_commit = trainer_module.append_commit

    async def append_and_die(broker: Broker, keys: Keys, commit: Commit, *mark: Any) -> None:
        await append_commit(broker, keys, commit, *mark)
        if commit.step == step:
            raise InterruptedError

    trainer_module.append_commit = append_and_die
    try:
        with pytest.raises(InterruptedError):
            await run(context)
    finally:
        trainer_module.append_commit = append_commit


async def assert_trained_once(broker: Broker, keys: Keys, steps: int) -> list[Commit]:
    """Nothing was lost, and every step has its commit and all its places filled."""
    tickets = await messages(broker, keys.prompts(), Ticket)
    commits = await assert_nothing_lost(broker, keys, len(tickets))
    assert len(commits) == steps
    assert sum(len(commit.trained_keys) for commit in commits) == steps * GROUPS * SIZE
    return commits


async def has_tickets(broker: Broker, keys: Keys, count: int) -> bool:
    return int(await broker.execute("XLEN", keys.prompts())) == count


async def has_commits(broker: Broker, keys: Keys, count: int) -> bool:
    return await num_commits(broker, keys) >= count


async def is_answered(broker: Broker, keys: Keys) -> bool:
    tickets = await broker.execute("XLEN", keys.prompts())
    return bool(await broker.execute("XLEN", keys.scores()) == tickets * SIZE)
