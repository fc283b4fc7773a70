"""Groups that are scored as a whole, against a real Redis: once, by whoever brings the last sample."""

import contextlib
import json
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from tests.support.rewards import beat_of, group, num_pending, scores, worker
from tests.support.waiting import wait_until
from tidemill.common.errors import LeaseLostError
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore
from tidemill.common.streams import Delivery, append, ensure_group, group_status, read_raw, trim_before
from tidemill.common.streams.consumer import Consumer
from tidemill.common.streams.group_results import delete_results
from tidemill.common.wire.codec import encode_payload
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Lane, ScoreStatus, Trajectory
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.rewards.groups import GroupResult

SIZE = 4
SOURCE = """
    def number(data_source, solution_str, ground_truth):
        return float(solution_str)

    def length(data_source, solution_str, ground_truth):
        return len(solution_str)

    def longest(completions, ground_truth, **kwargs):
        assert len(completions) == len(ground_truth)
        return [float(len(c) == max(map(len, completions))) if c else None for c in completions]

    def by_hand(scores, samples, *, bonus):
        assert [s["score"] for s in samples] == scores
        failed = next(s for s in samples if s["score"] is None)
        assert failed["status"] == "failed" and "ValueError" in failed["error"]
        return [bonus if s["solution_str"] == "bad" else s["score"] * int(s["ground_truth"]) for s in samples]

    def breaks(scores):
        raise RuntimeError("no group today")

    def short(scores):
        return scores[1:]

    def picks(scores):
        return [None, *scores[1:]]

    class Agent:
        def __init__(self, scale=1.0):
            self.scale = scale

        def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
            return float(solution_str) * self.scale, solution_str, "because"

        def post_process_scores(self, scores):
            return [score - min(scores) for score in scores]

    class Fills(Agent):
        def post_process_scores(self, scores):
            known = [score for score in scores if score is not None]
            return [sum(known) / len(known) if score is None else score for score in scores]

    class Drops(Agent):
        def post_process_scores(self, scores):
            return [*scores[:-1], None]

    class Breaks(Agent):
        def post_process_scores(self, scores):
            raise RuntimeError("no group today")

    def dies_afterwards(scores):
        import os, threading
        threading.Timer(0.2, os._exit, (3,)).start()
        return scores

    class Waits:
        async def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
            return float(solution_str)

        async def post_process_scores(self, scores):
            return [score + 1 for score in scores]
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(dedent(SOURCE))
    return str(tmp_path / "rewards.py")


@pytest.mark.parametrize(("config", "texts", "values", "said"), [
    ({"function": "FILE:number", "group": "FILE:by_hand", "group_kwargs": {"bonus": 9.0}},
     ("4", "bad", "2"), [4.0, 9.0, 2.0], "ValueError"),
    ({"function": "FILE:number", "group": "replace_failures_by_mean"},
     ("4", "bad", "2"), [4.0, 3.0, 2.0], "ValueError"),
    ({"function": "FILE:number", "group": "replace_failures_by_mean"},
     ("bad", "bad"), [None, None], "ValueError"),
    ({"function": "FILE:number", "group": "FILE:breaks"}, ("2", "4"), [None, None], "no group today"),
    ({"function": "FILE:number", "group": "FILE:short"}, ("2", "4"), [None, None], "expected 2"),
    ({"function": "FILE:number", "group": "FILE:picks"}, ("4", "2"), [None, 2.0], ""),
    ({"function": "FILE:Fills"}, ("4", "bad", "2"), [4.0, 3.0, 2.0], "ValueError"),
    ({"function": "FILE:Drops"}, ("4", "2"), [4.0, None],
     "post_process_scores of reward Drops returned None"),
    ({"rewards": {"a": {"function": "FILE:Breaks", "on_failure": 0.5}, "b": {"function": "FILE:length"}}},
     ("4", "3"), [1.5, 1.5], "no group today"),
])  # fmt: skip
async def test_what_is_made_of_a_whole_group_replaces_its_scores_and_failures(
    broker, keys, path, config, texts, values, said
):
    """`said` is the second sample's: why it failed, or had failed before."""
    tree = json.loads(json.dumps(config).replace("FILE", path))
    async with worker(broker, keys, **tree, max_attempts=1) as context:
        await append(broker, keys.trajectories(), *group(*texts))
        published = await scores(broker, keys, len(texts))
        assert not context.stopping.is_set()
    assert [score.value for score in published] == values
    assert {score.status for score in published if score.value is None} <= {ScoreStatus.FAILED}
    assert said in f"{published[1].error} {published[1].detail}"


async def test_a_group_is_published_at_once_when_its_last_score_is_in(broker, keys, path):
    samples = [
        sample.model_copy(update={"completion_ids": np.array([index, 7, 8], np.int32)})
        for index, sample in enumerate(group("4", "1", "3", "1"))
    ]
    first, *others = samples
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        await append(broker, keys.trajectories(), *others)
        await wait_until(lambda: _is_settled(broker, keys))
        assert await broker.execute("XLEN", keys.scores()) == 0
        await append(broker, keys.trajectories(), first)
        published = await scores(broker, keys, SIZE)
    assert [score.value for score in published] == pytest.approx([1.0, 1 / 6, 2 / 3, 1 / 6])
    assert [score.components["before_group"] for score in published] == [4.0, 1.0, 3.0, 1.0]
    assert [score.tokens_digest for score in published] == [
        sample.tokens_digest for sample in (first, *others)
    ]
    assert len({score.tokens_digest for score in published}) == SIZE
    assert await num_pending(broker, keys) == 0


async def test_a_process_of_the_group_function_that_dies_is_in_the_heartbeat(broker, keys, path):
    async with worker(broker, keys, function=f"{path}:number", group=f"{path}:dies_afterwards") as context:
        await append(broker, keys.trajectories(), *group("4", "1", "3", "1"))
        published = await scores(broker, keys, SIZE)
        (death,) = await wait_until(lambda: beat_of(context).failures)
    assert {score.status for score in published} == {ScoreStatus.OK}
    assert (death.what, death.kind) == ("a process of the group function", "died")
    assert "exit code 3" in death.reason and "no call running" in death.reason


async def test_every_group_is_scored_once_by_several_workers(broker: Broker, keys: Keys, path: str) -> None:
    trajectories = [t for ticket in range(20) for t in group("1", "2", "3", "4", ticket=ticket)]
    trajectories = trajectories[::3] + trajectories[1::3] + trajectories[2::3]
    async with contextlib.AsyncExitStack() as stack:
        for name in ("w1", "w2", "w3"):
            await stack.enter_async_context(
                worker(broker, keys, name, function=f"{path}:number", group="rank", max_in_flight=4)
            )
        await append(broker, keys.trajectories(), *trajectories)
        published = await scores(broker, keys, 80)
    assert [score.key for score in published] == [
        (ticket, index) for ticket in range(20) for index in range(4)
    ]
    assert [score.value for score in published] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0] * 20)


async def test_a_reward_class_post_processes_training_groups_and_not_evaluation(broker, keys, path):
    function = f"{path}:Agent"
    async with worker(broker, keys, function=function, kwargs={"scale": 2.0}, max_attempts=1):
        for lane in Lane:
            await append(broker, keys.trajectories(lane), *group("4", "3", "bad"))
        trained = await scores(broker, keys, 3)
        evaluated = await scores(broker, keys, 3, Lane.EVAL)
    assert [score.value for score in trained] == [2.0, 0.0, None]
    assert [score.value for score in evaluated] == [8.0, 6.0, None]
    assert trained[0].detail["notes"] == ["4", "because"]


@pytest.mark.parametrize(("name", "wanted"), [("Agent", [1.0, 0.0]), ("Waits", [5.0, 4.0])])
async def test_a_reward_class_post_processes_its_own_scores_beside_other_rewards(
    broker, keys, path, name, wanted
):
    rewards = {
        "agent": {"function": f"{path}:{name}", "max_attempts": 1, "weight": 10},
        "length": {"function": f"{path}:length", "weight": 0},
    }
    async with worker(broker, keys, rewards=rewards, group="normalise", group_kwargs={"scale": "none"}):
        await append(broker, keys.trajectories(), *group("4", "3", "bad"))
        published = await scores(broker, keys, 3)
    assert [score.components["agent"] for score in published] == [*wanted, None]
    assert [score.components["agent/before_group"] for score in published] == [4.0, 3.0, None]
    assert [score.components["before_group"] for score in published] == [40.0, 30.0, None]
    assert [score.value for score in published] == [
        5.0,
        -5.0,
        None,
    ]  # the run's group function has the last word
    assert "ValueError" in published[2].error


async def test_a_trl_function_may_be_given_the_whole_group(broker: Broker, keys: Keys, path: str) -> None:
    rewards = {
        "longest": {"function": f"{path}:longest", "per": "group", "weight": 10},
        "length": {"function": f"{path}:length"},
    }
    async with worker(broker, keys, rewards=rewards):
        for lane in Lane:  # evaluation needs the group as well, for this is no post-processing
            await append(broker, keys.trajectories(lane), *group("a", "bbb", ""))
            published = await scores(broker, keys, 3, lane)
            assert [score.value for score in published] == [1.0, 13.0, 0.0]
            assert published[2].components == {"longest": None, "length": 0.0}


@pytest.fixture
async def dead(broker: Broker, keys: Keys) -> Consumer[Trajectory]:
    """A worker that dies at the end of a test's first part."""
    await ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    return Consumer(
        broker, keys.trajectories(), REWARD_GROUP, "dead", Trajectory, lease_s=1.0, dead_key=keys.dead
    )


def result_of(delivery: Delivery[Trajectory], is_of_older_release: bool = False) -> GroupResult:
    trajectory = delivery.message
    outcomes = {"number": RewardOutcome(value=10 * float(trajectory.text))}
    if is_of_older_release:
        return GroupResult(trajectory=encode_payload(trajectory), outcomes=outcomes, worker="dead")
    return GroupResult(
        entry_id=delivery.entry_id,
        tokens_digest=trajectory.tokens_digest,
        outcomes=outcomes,
        worker="dead",
    )


@pytest.mark.parametrize("older", [(), (0,), (0, 1)], ids=["references", "both forms", "older release"])
async def test_who_takes_over_the_last_sample_finishes_the_group_without_scoring_again(
    broker, keys, path, dead, older
):
    """`older` are the samples whose results a worker of an older release has kept: with trajectories."""
    await append(broker, keys.trajectories(), *group("4", "2"))
    results = keys.results(0), keys.result_tickets()
    for index, delivery in enumerate(await dead.fetch(2, 0.0)):
        # It kept both results, and died before the group was published.
        assert isinstance(delivery, Delivery)
        kept = await dead.store_result(delivery, *results, result_of(delivery, index in older))
    assert kept is not None and len(kept) == 2
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        published = await scores(broker, keys, 2)
    assert [(score.value, score.worker) for score in published] == [(1.0, "dead"), (0.0, "dead")]
    assert [score.components["before_group"] for score in published] == [40.0, 20.0]
    with pytest.raises(LeaseLostError):  # should it come back from the dead
        await dead.publish_group(delivery, keys.scores(), results[0], published)
    assert await broker.execute("XLEN", keys.scores()) == 2


async def test_redis_has_each_trajectory_of_a_group_once(broker: Broker, keys: Keys, path: str) -> None:
    long = "1" * 300  # a number, of which nothing is in its score
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        await append(broker, keys.trajectories(), *group(long, "2", "3")[:2])
        await wait_until(lambda: _is_settled(broker, keys))
        kept = await broker.execute("HVALS", keys.results(0))
        assert len(kept) == 2
        assert not any(long.encode() in result for result in kept)
        await append(broker, keys.trajectories(), *group(long, "2", "3")[2:])
        published = await scores(broker, keys, 3)
    assert [score.value for score in published] == [1.0, 0.0, 0.5]


async def test_a_group_whose_payloads_lie_in_the_store_is_finished_from_there(
    broker, keys, path, tmp_path, monkeypatch
):
    (tmp_path / "run").mkdir()
    store = ClaimStore(tmp_path / "run", 1)
    claimed = [store.check_in(sample) for sample in group("4", "2", "3")]
    assert all(sample.claim is not None for sample in claimed)
    monkeypatch.setattr(broker, "claims", store)
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        await append(broker, keys.trajectories(), *claimed)
        published = await scores(broker, keys, 3)
    assert [score.value for score in published] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("has_copy", [True, False], ids=["has a copy", "is gone"])
async def test_a_trajectory_trimmed_before_its_group_was_complete(broker, keys, path, has_copy):
    """Redis may have it twice: an append whose answer was lost is repeated."""
    first, *others = group("4", "2", "3")
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        await append(broker, keys.trajectories(), first)
        await wait_until(lambda: _is_settled(broker, keys))
        if has_copy:
            await append(broker, keys.trajectories(), first)
        await append(broker, keys.trajectories(), others[0])
        await wait_until(lambda: _is_settled(broker, keys))
        (_, _), (second_id, _), *_ = await read_raw(broker, keys.trajectories())
        await trim_before(broker, keys.trajectories(), second_id)
        await append(broker, keys.trajectories(), others[1])
        published = await scores(broker, keys, 3)
    assert await num_pending(broker, keys) == 0
    if has_copy:
        assert [score.value for score in published] == [1.0, 0.0, 0.5]
        return
    assert [(score.value, score.status) for score in published] == [(None, ScoreStatus.FAILED)] * 3
    assert all("1 of the 3 trajectories" in score.error for score in published)


async def test_a_duplicate_of_a_finished_group_starts_nothing(broker: Broker, keys: Keys, path: str) -> None:
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        await append(broker, keys.trajectories(), *group("4", "2"))
        await scores(broker, keys, 2)
        await append(broker, keys.trajectories(), *group("4", "2"))
        await append(broker, keys.trajectories(), *group("1", "2", ticket=1))
        published = await scores(broker, keys, 4)
        await wait_until(lambda: _is_settled(broker, keys))
    assert [score.key for score in published] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert await broker.execute("XLEN", keys.scores()) == 4


async def test_what_a_dead_group_left_behind_is_deleted_and_nothing_else(broker, keys, path):
    async with worker(broker, keys, function=f"{path}:number", group="rank"):
        await append(broker, keys.trajectories(), *group("4", "2")[:1], *group("1", "2", ticket=1)[:1])
        await wait_until(lambda: _is_settled(broker, keys))
        assert await delete_results(broker, keys, Lane.TRAIN, {1}) == 1
        await append(broker, keys.trajectories(), *group("1", "2", ticket=1)[1:])
        published = await scores(broker, keys, 2)
    assert [score.key for score in published] == [(1, 0), (1, 1)]
    await delete_results(broker, keys, Lane.TRAIN, ())
    assert await broker.execute("EXISTS", keys.results(0), keys.results(1), keys.result_tickets()) == 0


async def _is_settled(broker: Broker, keys: Keys) -> bool:
    """Whether every trajectory was delivered and is pending no more."""
    status = await group_status(broker, keys.trajectories(), REWARD_GROUP)
    if status is None or status.pending:
        return False
    last = await broker.execute("XREVRANGE", keys.trajectories(), "+", "-", "COUNT", 1)
    return bool(last) and status.last_delivered == last[0][0].decode()
