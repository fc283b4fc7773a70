"""Several optimizer updates in a step: no crash or stop between two of them leaves anything half done."""

import asyncio
from typing import Any

import pytest

from tests.support.training import answering, commits_of, publish_group, replayed_digests
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    SIZE,
    assert_trained_once,
    crash_after_commit,
    has_tickets,
    run,
)
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy, load_policy


def dying_at(policy: type[Any], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process die in the middle of its update number `number`, counted from 1."""
    update, count = policy.update, 0

    def update_or_die(self: Any, denominator: float) -> UpdateResult:
        nonlocal count
        count += 1
        if count == number:
            raise InterruptedError
        return update(self, denominator)

    monkeypatch.setattr(policy, "update", update_or_die)


async def assert_replays_alike(broker: Broker, keys: Keys, context: Any, policy: Any) -> None:
    """An undisturbed run over the same records has the same weights at every step."""
    digests = [commit.digest for commit in await commits_of(broker, keys)]
    assert await replayed_digests(broker, keys, context.config, policy) == digests


@pytest.mark.parametrize("order", ["in_order", "as_ready"])
async def test_every_step_has_its_updates_and_every_ticket_is_trained_once(make, broker, keys, order):
    context = make(mini_batches=2, batch_order=order)
    async with answering(broker, keys):
        await run(context)
    commits = await assert_trained_once(broker, keys, 6)
    assert [len(commit.mini_batches) for commit in commits] == [2] * 6
    assert all(commit.metrics["mini_batches"] == 2.0 for commit in commits)
    for commit in commits:
        tickets = [sorted({t for micro in mini for t, _ in micro}) for mini in commit.mini_batches]
        assert [[ticket] for ticket in commit.groups] == tickets, "each update took the next group to arrive"
    await assert_replays_alike(broker, keys, context, SimulatedPolicy(context.config))


@pytest.mark.parametrize("number", [2, 6, 12])
@pytest.mark.parametrize("updates", [{"mini_batches": 2}, {"passes": 2}])
async def test_a_crash_between_two_updates_of_a_step_leaves_nothing_of_it(
    make, broker, keys, monkeypatch, updates, number
):
    context = make(**updates, checkpoint_every=2)
    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            dying_at(SimulatedPolicy, number, patch)
            with pytest.raises(InterruptedError):
                await run(context)
        assert len(await commits_of(broker, keys)) == number // 2 - 1
        await run(make(**updates, checkpoint_every=2))
    await assert_trained_once(broker, keys, 6)
    await assert_replays_alike(broker, keys, context, SimulatedPolicy(context.config))


async def test_a_stop_between_two_updates_of_a_step_saves_no_weights_of_no_version(
    make, broker, keys, monkeypatch
):
    context = make(mini_batches=2)
    updates = []
    monkeypatch.setattr(SimulatedPolicy, "update", _noting(SimulatedPolicy.update, updates))
    serving = asyncio.ensure_future(run(context))
    await wait_until(lambda: has_tickets(broker, keys, 2 * GROUPS))
    await publish_group(broker, keys, 0)
    await wait_until(lambda: bool(updates))
    context.stopping.set()
    await serving
    assert CheckpointStore(context.run_dir, 1).versions() == []
    async with answering(broker, keys):
        await run(make(mini_batches=2))  # ticket 0 is answered once more: the first answer counts
    trained = [key for commit in await commits_of(broker, keys) for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == 6 * GROUPS * SIZE
    await assert_replays_alike(broker, keys, context, SimulatedPolicy(context.config))


def _noting(function: Any, calls: list[Any]) -> Any:
    def noting(*args: Any) -> Any:
        result = function(*args)
        calls.append(args)
        return result

    return noting


@pytest.mark.parametrize("passes", [1, 2])
async def test_a_real_model_replays_its_mini_batches_bit_by_bit_after_a_crash(make, broker, keys, passes):
    """Proximal logprobs are computed at other moments the second time; the weights must not show it."""
    options: dict[str, Any] = {"mini_batches": 2, "passes": passes, "policy": "transformers"}
    options["optimizer"] = {"lr": 1e-2}
    async with answering(broker, keys):
        await crash_after_commit(make(steps=4, **options), 2)
        await run(make(steps=4, **options))
    commits = await assert_trained_once(broker, keys, 4)
    context = make(steps=4, **options)
    policy: TransformersPolicy = load_policy(context.config)
    await assert_replays_alike(broker, keys, context, policy)
    assert len({commit.digest for commit in commits}) == 4, "every step moved the weights"
    assert max(commit.metrics["logprob_gap/max"] for commit in commits) > 0
