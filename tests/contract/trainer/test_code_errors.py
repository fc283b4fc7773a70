"""A reward whose own code fails for all samples ends the run soon, with its reason; an outage does not."""

import asyncio

import numpy as np
import pytest

from tests.support.training import (
    make_context,
    make_parts,
    make_score,
    make_trimmer,
    messages,
    reading,
    trainer_config,
)
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.streams import append, code_errors
from tidemill.common.streams.code_errors import CodeErrors
from tidemill.common.wire.messages import Lane, Ticket
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler
from tidemill.services.trainer.batch.prompts import Prompt
from tidemill.services.trainer.batch.reconciler import Reconciler, RunStreams
from tidemill.services.trainer.evaluation import Evaluator
from tidemill.services.trainer.groups.group_filter import GroupFilter

EVAL = Lane.EVAL
REASON = "KeyError: 'score' (my.py, line 4)"


@pytest.fixture
def make(broker, keys, monkeypatch):
    """An assembler that gives up after 4 scores: two steps of one group of two."""
    monkeypatch.setattr(code_errors, "LEAST_GIVE_UP", 4)

    def make(**trainer):
        config = trainer_config(groups_per_step=1, **trainer)
        scheduler, join = make_parts(broker, keys, config)
        streams = RunStreams(scheduler, join, Reconciler(broker, keys, scheduler))
        return BatchAssembler(make_context(broker, keys, config), streams, GroupFilter(config))

    return make


@pytest.fixture
def fail(broker, keys):
    """Publish a group of two of which both scores failed."""

    async def fail(ticket, is_code_error=True, lane=Lane.TRAIN):
        for index in (0, 1):
            sample = make_trajectory(ticket, index, group_size=2)
            score = make_score(
                ticket, index, None, error=REASON, is_code_error=is_code_error,
                tokens_digest=sample.tokens_digest,
            )  # fmt: skip
            await append(broker, keys.trajectories(lane), sample)
            await append(broker, keys.scores(lane), score)

    return fail


async def test_a_run_ends_with_the_reason_where_every_score_of_two_steps_is_an_error_of_the_code(make, fail):
    assembler = make()
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        taking = asyncio.create_task(assembler.take(0, 1))
        await wait_until(lambda: assembler.code_errors.has_begun)
        for ticket in range(2):
            await fail(ticket)
        with pytest.raises(
            ConfigError, match=r"the last 4 scores failed.*KeyError: 'score' \(my.py, line 4\)"
        ):
            await asyncio.wait_for(taking, 60)


@pytest.mark.parametrize("on_failure", ["drop_sample", 0.0])
async def test_outages_are_waited_for_and_a_value_for_failures_is_taken(make, fail, on_failure):
    """As many failures, but of a server; or a number stands for them."""
    assembler = make(reward__on_failure=on_failure, algorithm={"filter_zero_variance": True})
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        taking = asyncio.create_task(assembler.take(0, 1))
        await wait_until(lambda: assembler.code_errors.has_begun)
        for ticket in (0, 2, 3):  # each the replacement of the one before; 1 is of the next step
            await fail(ticket, is_code_error=on_failure != "drop_sample")
            await wait_until(lambda ticket=ticket: ticket in [number for number, *_ in assembler.dropped])
        assert not taking.done()
        taking.cancel()


def test_what_was_scored_before_this_trainer_does_not_count_and_a_value_begins_the_count_again():
    errors = CodeErrors(trainer_config(), num_scores=2)
    failed = make_score(0, 0, None, error=REASON, is_code_error=True)
    errors.begin("7-5")
    for entry_id in ("6-9", "7-4", "7-5"):
        errors.note(entry_id, failed)
    errors.check()
    for score in (failed, make_score(0, 1, 1.0), failed):
        errors.note("7-6", score)
    errors.check()
    errors.note("8-0", failed)
    with pytest.raises(ConfigError, match="correct the code"):
        errors.check()


def num_until_the_end(errors: CodeErrors) -> int:
    """Failed scores that it takes to end the run."""
    errors.begin("1-0")
    errors.begin("9999-0")  # nothing is left out where it begins a second time
    failed = make_score(0, 0, None, error=REASON, is_code_error=True)
    for number in range(1, 2000):
        errors.note(f"{number + 1}-0", failed)
        try:
            errors.check()
        except ConfigError:
            return number
    return 0


@pytest.mark.parametrize(("num_groups", "size", "num_scores"), [(1, 2, 64), (20, 5, 200), (300, 8, 1024)])
def test_the_scores_of_two_steps_end_a_run_within_bounds(num_groups, size, num_scores):
    """2 steps of 20 groups of 5 are 200 scores."""
    config = trainer_config(groups_per_step=num_groups, group_size=size)
    assert num_until_the_end(CodeErrors.of_training(config)) == num_scores


def test_eight_failures_are_enough_where_they_took_more_than_five_minutes(monkeypatch):
    clock = {"s": 0.0}
    monkeypatch.setattr(code_errors.time, "monotonic", lambda: clock["s"])
    errors = CodeErrors(trainer_config(), num_scores=64)
    errors.begin("1-0")
    failed = make_score(0, 0, None, error=REASON, is_code_error=True)
    for minute in range(7):
        clock["s"] = 60.0 * minute
        errors.note(f"{minute + 2}-0", failed)
        errors.check()
    clock["s"] = 420.0
    errors.note("9-0", failed)
    with pytest.raises(ConfigError, match="the last 8 scores failed"):
        errors.check()


@pytest.mark.parametrize(("group_size", "num_scores"), [(8, 64), (64, 256)])
def test_a_rescoring_does_not_end_over_one_row_that_fails_its_whole_group(group_size, num_scores):
    errors = CodeErrors.of_rescoring(trainer_config(group_size=group_size))
    errors.begin("0-1")
    failed = make_score(0, 0, None, error=REASON, is_code_error=True)
    for number in range(1, num_scores):
        errors.note(f"1-{number}", failed)
    errors.check()
    errors.note(f"1-{num_scores}", failed)
    with pytest.raises(ConfigError):
        errors.check()


async def test_an_evaluation_of_which_all_fails_by_code_ends_the_run_and_is_done_again_after_it(
    broker, keys, fail
):
    """A trainer that resumes, with the code corrected, issues the same tickets; nothing failed is left."""
    rows = [Prompt(np.array([3, i], np.int32), "", "test", str(i), {}, i) for i in range(3)]
    config = trainer_config(evaluation={"samples": 2, "temperature": 0.7})
    context = make_context(broker, keys, config)

    def evaluate():
        evaluator = Evaluator(context, {"a": rows}, make_trimmer(context))
        return evaluator, asyncio.create_task(evaluator.evaluate(1))

    async def has_tickets():
        return len(await messages(broker, keys.prompts(EVAL), Ticket)) == 3

    _, first = evaluate()
    await wait_until(has_tickets)
    for ticket in (3, 4, 5):
        await fail(ticket, lane=EVAL)
    with pytest.raises(ConfigError, match=r"the last 6 scores of an evaluation failed.*KeyError"):
        await asyncio.wait_for(first, 60)
    assert not await messages(broker, keys.prompts(EVAL), Ticket)
    await fail(4, lane=EVAL)  # a worker had it in hand as the run ended
    evaluator, second = evaluate()
    await wait_until(has_tickets)
    for ticket in (3, 4, 5):
        for index in (0, 1):
            sample = make_trajectory(ticket, index, group_size=2)
            await append(broker, keys.trajectories(EVAL), sample)
            value = 1.0 if ticket < 5 else None
            score = make_score(ticket, index, value, error="" if value else REASON, is_code_error=not value)
            await append(broker, keys.scores(EVAL), score)
    results = await asyncio.wait_for(second, 60)
    assert (results["a"]["num_samples"], results["a"]["num_failed"], results["a"]["score"]) == (4, 2, 1.0)
    assert evaluator.reasons == {"a": REASON}
