"""Evaluation over real streams: what it sums up, and that nothing makes it wait for ever."""

import asyncio
import math

import numpy as np
import pytest

from tests.support.training import lose_tail, make_context, make_score, make_trimmer, messages, trainer_config
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import OUTPUT_LIMIT
from tidemill.common.streams import START, OffsetReader, append, ensure_group, entry_id_of, last_id
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Ticket
from tidemill.services.trainer import evaluation
from tidemill.services.trainer.batch.prompts import Prompt
from tidemill.services.trainer.evaluation import Evaluations, Evaluator
from tidemill.services.trainer.service import open_evaluator

EVAL = Lane.EVAL
LIMIT = "client-output-buffer-limit"


def prompts(count: int) -> list[Prompt]:
    return [Prompt(np.array([3, i], np.int32), "", "test", str(i), {}, i) for i in range(count)]


@pytest.fixture
def make(broker, keys):
    """An evaluator of two samples a prompt, on sets `a` of two prompts and `b` of one."""

    def make(a=2, b=1, algorithm=None, **evaluation):
        sampled = {"samples": 2, "temperature": 0.7, **evaluation}
        config = trainer_config(evaluation=sampled, algorithm=algorithm or {})
        context = make_context(broker, keys, config)
        return Evaluator(context, {"a": prompts(a), "b": prompts(b)}, make_trimmer(context))

    return make


@pytest.fixture
def publish(broker, keys):
    """Answer samples of the evaluation lane: from (ticket, index) to the score, None for a failed one."""

    async def publish(values, **fields):
        for (ticket, index), value in values.items():
            sample = make_trajectory(ticket, index, **{"group_size": 2} | fields)
            await append(broker, keys.trajectories(EVAL), sample)
            score = make_score(ticket, index, value, tokens_digest=sample.tokens_digest)
            await append(broker, keys.scores(EVAL), score)

    return publish


async def evaluated(evaluator: Evaluator, version: int) -> Evaluations:
    return await asyncio.wait_for(evaluator.evaluate(version), 120)


async def die(broker: Broker, keys: Keys, ticket: int, index: int = -1, origin: str = "prompts:eval") -> None:
    letter = DeadLetter(origin=origin, entry_id="1-0", error="refused", ticket=ticket, index=index)
    await append(broker, keys.dead, letter)


@pytest.mark.parametrize(
    ("every", "at_start", "due"),
    [(0, True, [0, 6]), (0, False, [6]), (2, True, [0, 2, 4, 6]), (4, False, [4, 6])],
)
def test_which_versions_are_evaluated(make, every, at_start, due):
    evaluator = make(every=every, at_start=at_start)
    assert [version for version in range(7) if evaluator.is_due(version, 6)] == due


def test_what_is_due_and_how_it_is_sampled_is_what_its_own_section_says(make):
    assert not any(make(0, 0, every=1).is_due(version, 6) for version in range(7)), "there are no prompts"
    plain = make().sampling
    sampling = make(top_p=0.7, top_k=20, min_p=0.05).sampling
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (0.7, 1.0, 0, 0.0)
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.max_tokens) == (
        0.7,
        20,
        0.05,
        plain.max_tokens,
    )


async def test_a_run_without_sets_takes_back_what_earlier_sets_have_left(make, broker, keys):
    context = make_context(broker, keys, trainer_config())
    trimmer = make_trimmer(context)
    assert await open_evaluator(context, {}, trimmer) is None, "there is nothing to take back"
    evaluating = asyncio.ensure_future(make().evaluate(0))
    await wait_until(lambda: _num_tickets(broker, keys))
    evaluating.cancel()
    await asyncio.gather(evaluating, return_exceptions=True)
    evaluator = await open_evaluator(context, {}, trimmer)
    assert evaluator is not None
    await evaluator.take_back(0)
    assert not await _num_tickets(broker, keys)


class TestSums:
    async def test_numbers_are_those_of_each_set_and_of_this_version_and_failed_samples_are_no_zeros(
        self, make, publish, broker, keys
    ):
        """Version 4 has tickets 12, 13 (set a) and 14 (set b); what is of others, or comes later, does not
        count."""
        await publish({(11, 0): 1.0, (15, 0): 1.0})
        values = {(12, 0): 1.0, (12, 1): 0.4, (12, 2): 0.0, (13, 0): 0.0, (13, 1): None, (13, 2): None}
        await publish(values, finish="length", group_size=3)
        await publish({(14, index): None for index in range(3)} | {(12, 0): 0.0}, group_size=3)
        results = await evaluated(make(algorithm={"success_threshold": 0.4}, samples=3), 4)
        # 1 - C(1, 2) / C(3, 2) pass at 2; the other prompt has one score.
        assert results["a"] == {
            "score": pytest.approx(1.4 / 4), "accuracy": 0.5, "pass_at_k": 0.5, "mean_length": 3.0,
            "clipped_ratio": 1.0, "num_samples": 4, "num_failed": 2, "pass_at_2": 1.0,
        }  # fmt: skip
        b = results["b"]
        assert math.isnan(b["score"]) and math.isnan(b["pass_at_2"])
        assert (b["num_samples"], b["num_failed"]) == (0, 3)
        tickets = await messages(broker, keys.prompts(EVAL), Ticket)
        assert [(t.ticket, t.step, t.min_version, t.group_size) for t in tickets] == [
            (12, 4, 4, 3), (13, 4, 4, 3), (14, 4, 4, 3),
        ]  # fmt: skip

    async def test_components_have_means_over_the_samples_that_have_them(self, make, broker, keys):
        """A failed sample has no part in it."""
        values = {(0, 0): 1.0, (0, 1): None, (1, 0): 0.0, (1, 1): 0.0, (2, 0): 0.0, (2, 1): 0.0}
        for key, value in values.items():
            components = {"rule": 0.5 if key[0] == 0 else 1.0, "judge": None}
            await append(broker, keys.trajectories(EVAL), make_trajectory(*key, group_size=2))
            await append(broker, keys.scores(EVAL), make_score(*key, value, components=components))
        a = (await evaluated(make(), 0))["a"]
        assert a["rewards/rule/mean"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
        assert not any("judge" in name for name in a)

    async def test_dead_tickets_and_dead_samples_are_failed_samples(self, make, publish, broker, keys):
        await publish({(0, 0): 1.0, (2, 0): 0.0, (2, 1): 1.0})
        await die(broker, keys, 0, 1, "trajectories:eval")
        await die(broker, keys, 1)
        await die(broker, keys, 2, origin="prompts")  # the training lane has a ticket 2 of its own
        results = await evaluated(make(), 0)
        assert {name: (r["num_samples"], r["num_failed"]) for name, r in results.items()} == {
            "a": (1, 3),
            "b": (2, 0),
        }

    async def test_letters_are_not_read_again_by_every_evaluation(
        self, make, publish, broker, keys, monkeypatch
    ):
        evaluator = make(a=1, b=0)
        execute = broker.execute
        places = []

        async def noted(*command):
            if command[0] == "XREAD" and command[-2] == keys.dead:
                places.append(command[-1])
            return await execute(*command)

        await die(broker, keys, 0)
        await evaluated(evaluator, 0)
        end = await last_id(broker, keys.dead)
        monkeypatch.setattr(broker, "execute", noted)
        await publish({(1, 0): 1.0, (1, 1): 0.0})
        assert (await evaluated(evaluator, 1))["a"]["num_samples"] == 2
        assert set(places) == {end}


class TestInterrupted:
    async def test_a_restarted_trainer_goes_on_where_the_evaluation_was(self, make, publish, broker, keys):
        first = asyncio.ensure_future(make().evaluate(0))
        await wait_until(lambda: _num_tickets(broker, keys))
        await publish({(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0})
        await die(broker, keys, 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(evaluated(make(), 0))
        await publish({(1, 1): 0.0})
        results = await second
        assert (results["a"]["score"], results["a"]["num_failed"], results["b"]["num_failed"]) == (0.75, 0, 2)
        assert await _num_tickets(broker, keys) == 3

    async def test_a_restarted_trainer_reads_more_samples_than_redis_answers_at_once(
        self, make, publish, broker, monkeypatch
    ):
        monkeypatch.setattr(evaluation, "READ_COUNT", 2)
        samples = {(ticket, index): 1.0 for ticket in range(8) for index in range(2)}
        await publish(samples, text="x" * 100_000)
        await broker.execute("CONFIG", "SET", LIMIT, f"normal {4 * 100_000} 0 0")
        try:
            results = await evaluated(make(7, 1), 0)
        finally:
            await broker.execute("CONFIG", "SET", LIMIT, " ".join(OUTPUT_LIMIT))
        assert (results["a"]["num_samples"], results["b"]["num_samples"]) == (14, 2)

    async def test_streams_are_kept_until_the_results_are_safe_and_then_not_waited_for(
        self, make, publish, broker, keys
    ):
        await publish({(ticket, index): 1.0 for ticket in range(3) for index in (0, 1)})
        assert await evaluated(make(), 0)
        assert (await evaluated(make(), 0))["a"]["score"] == 1.0, "a crash before the record was written"
        task = asyncio.ensure_future(make().evaluate(1))
        await wait_until(lambda: _has_tickets(broker, keys, 6))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await make().trim(0)
        for key in (keys.trajectories(EVAL), keys.scores(EVAL)):
            assert await broker.execute("XLEN", key) == 0
        tickets = await messages(broker, keys.prompts(EVAL), Ticket)
        assert [ticket.ticket for ticket in tickets] == [3, 4, 5], "those of the next one stay"
        assert await evaluated(make(), 0) == {}


class TestLosses:
    @pytest.mark.parametrize("num_trimmed", [0, 3, 6])
    async def test_versions_that_a_restart_comes_to_again_are_evaluated_again(
        self, make, publish, broker, keys, num_trimmed
    ):
        """Redis has lost their commits; tickets 6 to 8 are of version 2, 9 to 11 of version 3."""
        lost = make()
        for version, first in ((2, 6), (3, 9)):
            await publish({(first + i, index): 0.0 for i in range(3) for index in (0, 1)})
            assert (await evaluated(lost, version))["a"]["score"] == 0.0
            if num_trimmed > 3 * (version - 2):
                await lost.trim(version)
            else:  # a worker took it up again
                await broker.execute("HSET", keys.progress(first, EVAL), "0", "")
        again = make()
        await again.take_back(1)
        assert not await broker.execute("EXISTS", keys.progress(6, EVAL), keys.progress(9, EVAL))
        for version, first in ((2, 6), (3, 9)):
            await publish({(first + i, index): 1.0 for i in range(3) for index in (0, 1)})
            assert (await evaluated(again, version))["a"]["score"] == 1.0
        assert [t.ticket for t in await messages(broker, keys.prompts(EVAL), Ticket)] == list(range(6, 12))
        await broker.execute("XADD", keys.prompts(EVAL), "*", "hello", "world")
        await again.take_back(3)
        assert await _num_tickets(broker, keys) == 6, "the version that it starts at stays"
        assert await broker.execute("XLEN", keys.trajectories(EVAL)), "and so do its samples"

    async def test_a_score_of_other_tokens_is_not_the_samples(self, make, publish, broker, keys):
        await append(broker, keys.scores(EVAL), make_score(0, 0, 0.0, tokens_digest="0" * 16))
        await publish({(ticket, index): 1.0 for ticket in range(3) for index in (0, 1)})
        assert (await evaluated(make(), 0))["a"]["score"] == 1.0

    @pytest.mark.parametrize("num_left", [0, 1])
    async def test_tickets_that_redis_has_lost_are_issued_again(self, make, publish, broker, keys, num_left):
        task = asyncio.ensure_future(evaluated(make(), 0))
        await wait_until(lambda: _has_tickets(broker, keys, 3))
        if num_left:
            await lose_tail(broker, keys.prompts(EVAL), entry_id_of(num_left - 1))
        else:
            await broker.execute("DEL", keys.prompts(EVAL))
        await wait_until(lambda: _has_tickets(broker, keys, 3))
        await publish({(ticket, index): 1.0 for ticket in range(3) for index in (0, 1)})
        assert (await task)["a"]["score"] == 1.0

    async def test_a_sample_that_no_stream_can_bring_any_more_is_a_failed_one(
        self, make, publish, broker, keys
    ):
        """Its trajectory was damaged on the way: it is a dead letter, but no one can tell whose it was."""
        for key, group in ((keys.prompts(EVAL), ROLLOUT_GROUP), (keys.trajectories(EVAL), REWARD_GROUP)):
            await ensure_group(broker, key, group)
        task = asyncio.ensure_future(evaluated(make(), 0))
        await wait_until(lambda: _has_tickets(broker, keys, 3))
        await publish({(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (2, 0): 0.5, (2, 1): 0.5})
        await _work_off(broker, keys.prompts(EVAL), ROLLOUT_GROUP)
        assert not task.done()
        await _work_off(broker, keys.trajectories(EVAL), REWARD_GROUP)
        results = await task
        assert (results["a"]["num_samples"], results["a"]["num_failed"]) == (3, 1)
        assert results["b"]["num_failed"] == 0

    async def test_samples_of_a_server_whose_clock_is_behind_are_not_failed_ones(
        self, make, publish, broker, keys, monkeypatch
    ):
        """They have lower ids than what was read of the server before."""
        read = OffsetReader.read
        seen = set()
        far = "9999999999999-0"

        async def note(reader, *args):
            entries = await read(reader, *args)
            seen.add((reader.key, reader.position))
            return entries

        monkeypatch.setattr(OffsetReader, "read", note)
        groups = {keys.prompts(EVAL): ROLLOUT_GROUP, keys.trajectories(EVAL): REWARD_GROUP}
        for key, group in groups.items():
            await ensure_group(broker, key, group)
        task = asyncio.ensure_future(evaluated(make(), 0))
        await wait_until(lambda: _has_tickets(broker, keys, 3))
        logs = (keys.trajectories(EVAL), keys.scores(EVAL))
        for key in logs:
            await broker.execute("XADD", key, far, "v", "1.0", "p", b"")
        await wait_until(lambda: seen >= {(key, far) for key in logs})
        for key in logs:
            await lose_tail(broker, key, START)
        await publish({(ticket, index): 1.0 for ticket in range(3) for index in (0, 1)})
        for key, group in groups.items():
            await _work_off(broker, key, group)
        assert {result["num_failed"] for result in (await task).values()} == {0}


async def _work_off(broker: Broker, key: str, group: str) -> None:
    reply = await broker.execute("XREADGROUP", "GROUP", group, "w", "COUNT", 100, "STREAMS", key, ">")
    for entry_id, _ in reply[0][1]:
        await broker.execute("XACK", key, group, entry_id)


async def _num_tickets(broker: Broker, keys: Keys) -> int:
    return int(await broker.execute("XLEN", keys.prompts(EVAL)))


async def _has_tickets(broker: Broker, keys: Keys, count: int) -> bool:
    return await _num_tickets(broker, keys) == count
