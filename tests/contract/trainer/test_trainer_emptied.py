"""Redis has lost everything (FLUSHALL, or its AOF is gone); the trainer gives back what the run needs."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.training import answering, commits_of, messages
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    SIZE,
    crash_after_commit,
    has_commits,
    has_tickets,
    run,
)
from tidemill.common.process import service
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import RUNNING, publish_config, read_config, read_state
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.step import StepRunner
from tidemill.services.trainer.trainer import Trainer


async def empty(broker: Broker, keys: Keys) -> None:
    """FLUSHALL, as far as it concerns this run."""
    found = await broker.execute("KEYS", keys.config.replace(":config", ":*").replace("{", "[{]"))
    if found:
        await broker.execute("DEL", *found)


async def assert_whole(broker: Broker, keys: Keys, steps: int = 6) -> None:
    """Redis has the whole history again, no sample was trained twice, and a worker may join."""
    commits = await commits_of(broker, keys)
    assert [commit.step for commit in commits] == list(range(steps))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == steps * GROUPS * SIZE
    assert (await read_config(broker, keys)).trainer.steps == steps


@pytest.mark.parametrize("step", [0, 3, 5])
async def test_a_redis_that_is_emptied_while_a_step_is_trained_gets_everything_back(
    make, broker, keys, monkeypatch, step
):
    train = StepRunner.run

    async def train_and_empty(runner: StepRunner, number: int, assembler: Any) -> Any:
        result = await train(runner, number, assembler)
        if number == step:
            await empty(broker, keys)
        return result

    monkeypatch.setattr(StepRunner, "run", train_and_empty)
    context = make()
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await run(context)
    await assert_whole(broker, keys)


async def test_a_redis_that_is_emptied_while_the_trainer_waits_gets_everything_back(make, broker, keys):
    context = make()
    await publish_config(broker, keys, context.config)
    serving = asyncio.ensure_future(run(context))
    async with answering(broker, keys):
        await wait_until(lambda: has_commits(broker, keys, 2))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS * 4))
    await empty(broker, keys)
    async with answering(broker, keys):
        await serving
    await assert_whole(broker, keys)


async def test_a_redis_that_is_emptied_while_there_is_no_trainer_gets_everything_back(make, broker, keys):
    context = make(has_eval=True)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await crash_after_commit(context, 4)
    await empty(broker, keys)
    async with answering(broker, keys):
        await run(make(has_eval=True))
    await assert_whole(broker, keys)
    evaluations = (await read_state(broker, keys))["evaluations"]
    assert [(item["version"], item["set"]) for item in evaluations] == [(0, "held"), (6, "held")]


async def test_a_trainer_that_dies_right_after_redis_was_emptied_leaves_a_run_to_go_on_with(
    make, broker, keys, monkeypatch
):
    """It has issued the tickets of its last version again, and the checkpoint is of an earlier one."""
    context = make(checkpoint_every=2)
    await publish_config(broker, keys, context.config)
    append_commit = trainer_module.append_commit

    async def never(_broker: Broker, _keys: Keys, commit: Commit, *mark: Any) -> None:
        if commit.step == 4:
            raise InterruptedError
        await append_commit(_broker, _keys, commit, *mark)
        if commit.step == 3:
            await empty(broker, keys)

    saves = Trainer._save

    async def save_early(trainer: Trainer) -> None:
        if trainer.version <= 2:
            await saves(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "append_commit", never)
        patch.setattr(Trainer, "_save", save_early)
        async with answering(broker, keys):
            with pytest.raises(InterruptedError):
                await run(context)
    assert min(t.ticket for t in await messages(broker, keys.prompts(), Ticket)) > 3 * GROUPS
    with capture_logs() as logs:
        async with answering(broker, keys):
            await run(make(checkpoint_every=2))
    await assert_whole(broker, keys)
    assert not [line for line in logs if line["event"] == "no stream holds what is missing of this group"]


async def test_a_trainer_that_finds_no_config_takes_the_one_of_the_run_folder(
    make, broker, keys, monkeypatch
):
    """The run's config is in its folder as well, so that a restart needs no person."""
    from argparse import Namespace

    context = make()
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await crash_after_commit(context, 1)
    await empty(broker, keys)
    monkeypatch.setenv("TIDEMILL_RUNS_DIR", str(context.run_dir.parent))
    (context.run_dir.parent / keys.run_id).symlink_to(context.run_dir)
    found = await service._find_config("trainer", broker, keys, Namespace())
    assert found.trainer == context.config.trainer
    assert (await read_config(broker, keys)).trainer == context.config.trainer
    assert (await read_state(broker, keys)).get("status") in (None, RUNNING)
