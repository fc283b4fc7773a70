"""Redis comes back without its last second, and the trainer gives it back what it has lost."""

import asyncio
from typing import Any

from common.broker import Broker
from common.keys import Keys
from common.messages import Lane
from services.trainer.checkpointing import Checkpointer
from services.trainer.step import StepRunner
from tests.training import answering, lose_tail, num_commits
from tests.waiting import wait_until
from tests.whole_trainer import assert_trained_once, has_commits, run


async def test_a_lost_commit_comes_back_before_the_next_one(make, broker, keys, monkeypatch):
    """Behind the next one there would be no place for it any more, and no way to replay it."""
    train = StepRunner.run

    async def lose_and_train(runner: StepRunner, step: int, collector: Any) -> Any:
        result = await train(runner, step, collector)
        if step == 3:
            await lose_tail(broker, keys.commits, "1-0")
        return result

    monkeypatch.setattr(StepRunner, "run", lose_and_train)
    async with answering(broker, keys):
        await run(make())
    await assert_trained_once(broker, keys, 6)


async def test_the_trainer_saves_a_checkpoint_at_once_when_redis_has_restarted(
    make, broker, keys, monkeypatch
):
    """What was trained on may be gone, so that the steps since the last checkpoint cannot be replayed."""
    info, saved, save = broker.info, [], Checkpointer.save

    async def info_of_two_servers(section: str) -> dict[str, str]:
        found = await info(section)
        return found | {"run_id": "second" if await num_commits(broker, keys) >= 2 else "first"}

    async def note(checkpointer: Checkpointer, version: int, dropped: Any) -> None:
        saved.append(version)
        await save(checkpointer, version, dropped)

    monkeypatch.setattr(broker, "info", info_of_two_servers)
    monkeypatch.setattr(Checkpointer, "save", note)
    async with answering(broker, keys):
        await run(make())
    assert saved == [3, 4, 6]
    await assert_trained_once(broker, keys, 6)


async def test_an_evaluation_gets_the_announcement_back_that_its_workers_wait_for(make, broker, keys):
    serving = asyncio.ensure_future(run(make(steps=1, has_eval=True)))
    await wait_until(lambda: _is_announced(broker, keys))
    async with answering(broker, keys, lanes=[Lane.TRAIN]):
        await wait_until(lambda: has_commits(broker, keys, 1))
        await broker.execute("DEL", keys.weights)
        await wait_until(lambda: _is_announced(broker, keys), what="version 0 is announced again")
    async with answering(broker, keys):
        await serving


async def _is_announced(broker: Broker, keys: Keys) -> bool:
    return bool(await broker.execute("XLEN", keys.weights))
