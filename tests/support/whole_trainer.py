"""The whole trainer in the test's process, with workers that answer at once: run, stopped, crashed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.training import assert_nothing_lost, messages, num_commits
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.service import serve
from tidemill.services.trainer.step import StepResult, StepRunner

GROUPS, SIZE = 2, 2
"""Groups of a step, and samples of a group, in the contexts that `make` makes."""


async def run(context: ServiceContext) -> None:
    await asyncio.wait_for(serve(context), 120)


async def crash_after_commit(context: ServiceContext, step: int) -> None:
    """Run a trainer that dies when it has committed `step`, before it does anything else."""
    await _crash_at_commit(context, step, is_appended=True)


async def crash_before_commit(context: ServiceContext, step: int) -> None:
    """Run a trainer that dies when it is about to commit `step`: the version before is announced."""
    await _crash_at_commit(context, step, is_appended=False)


async def _crash_at_commit(context: ServiceContext, step: int, is_appended: bool) -> None:
    append_commit = trainer_module.append_commit

    async def append_and_die(broker: Broker, keys: Keys, commit: Commit, *mark: Any) -> None:
        if commit.step != step or is_appended:
            await append_commit(broker, keys, commit, *mark)
        if commit.step == step:
            raise InterruptedError

    trainer_module.append_commit = append_and_die
    try:
        with pytest.raises(InterruptedError):
            await run(context)
    finally:
        trainer_module.append_commit = append_commit


def after_training(
    monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[StepResult], Awaitable[object]]
) -> None:
    """Do something when this step is trained, and not committed."""
    train = StepRunner.run

    async def train_and_act(runner: StepRunner, number: int, assembler: Any) -> StepResult:
        result = await train(runner, number, assembler)
        if number == step:
            await act(result)
        return result

    monkeypatch.setattr(StepRunner, "run", train_and_act)


def assert_each_once(commits: list[Commit], steps: int) -> None:
    """Every step has its commit and all its places, and no sample was trained twice."""
    assert [commit.step for commit in commits] == list(range(steps))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == steps * GROUPS * SIZE


async def assert_trained_once(broker: Broker, keys: Keys, steps: int) -> list[Commit]:
    """Nothing was lost, and every step has its commit and all its places filled."""
    tickets = await messages(broker, keys.prompts(), Ticket)
    commits = await assert_nothing_lost(broker, keys, len(tickets))
    assert_each_once(commits, steps)
    return commits


async def has_tickets(broker: Broker, keys: Keys, count: int) -> bool:
    return int(await broker.execute("XLEN", keys.prompts())) == count


async def has_commits(broker: Broker, keys: Keys, count: int) -> bool:
    return await num_commits(broker, keys) >= count


async def empty(broker: Broker, keys: Keys) -> None:
    """FLUSHALL, as far as it concerns this run."""
    found = await broker.execute("KEYS", keys.config.replace(":config", ":*").replace("{", "[{]"))
    if found:
        await broker.execute("DEL", *found)


async def is_answered(broker: Broker, keys: Keys) -> bool:
    tickets = await broker.execute("XLEN", keys.prompts())
    return bool(await broker.execute("XLEN", keys.scores()) == tickets * SIZE)
