"""The cache of rewards against a real Redis: nothing is paid for twice, and it stays within its bounds."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import make_sample
from tests.support.waiting import wait_until
from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.rewards.cache import RewardCache, version_of
from tidemill.services.reward.rewards.weighted_sum import NamedReward
from tidemill.services.reward.sample import RewardSample


class Paid:
    """A reward that counts what it is asked, and may wait or fail."""

    slots = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, sample: RewardSample) -> RewardOutcome:
        self.asked.append(sample.trajectory.text)
        await self.gate.wait()
        if sample.trajectory.text == "fail":
            raise AttemptError("no verdict")
        return RewardOutcome(float(len(self.asked)), {"tokens": 7.0}, {"verdict": "good"})

    async def close(self) -> None: ...


def sample(text: str, ticket: int = 0, truth: Any = "1", **fields: Any) -> RewardSample:
    return make_sample(
        (ticket, 0), False, "src", text, truth, prompt_text=fields.pop("prompt", "p"), **fields
    )


def named(
    broker: Broker, keys: Keys, reward: Paid, name: str = "judge", max_bytes: int = 1 << 20
) -> NamedReward:
    config = NamedRewardConfig(function="gsm8k", cache=True, max_attempts=1)
    return NamedReward(name, config, reward, RewardCache(broker, keys, max_bytes))


async def test_the_same_sample_is_paid_for_once_also_by_another_worker(broker: Broker, keys: Keys) -> None:
    reward = Paid()
    first = await named(broker, keys, reward).score(sample("text", ticket=1))
    again = await named(broker, keys, reward).score(sample("text", ticket=2))
    assert reward.asked == ["text"]
    assert again == first == RewardOutcome(value=1.0, components={"tokens": 7.0}, detail={"verdict": "good"})
    assert again.is_ok


@pytest.mark.parametrize(
    "changed", [{"truth": "2"}, {"prompt": "q"}, {"extra_info": {"rubric": "new"}}, {"text": "t"}]
)
async def test_whatever_decides_a_reward_is_part_of_its_name(broker, keys, changed):
    reward = Paid()
    cached = named(broker, keys, reward)
    await cached.score(sample("text"))
    await cached.score(sample(**({"text": "text"} | changed)))
    assert len(reward.asked) == 2
    await named(broker, keys, reward, "second").score(sample("text"))
    assert len(reward.asked) == 3


def test_a_changed_function_or_setting_is_another_reward_and_a_limit_is_not(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("one")
    config = NamedRewardConfig(function=f"{path}:f")
    version = version_of("a", config)
    assert version_of("a", config.model_copy(update={"timeout_s": 1.0, "weight": 3.0})) == version
    assert version_of("a", config.model_copy(update={"kwargs": {"x": 1}})) != version
    path.write_text("two")
    assert version_of("a", config) != version


async def test_failures_are_not_kept(broker: Broker, keys: Keys) -> None:
    reward = Paid()
    cached = named(broker, keys, reward)
    assert not (await cached.score(sample("fail"))).is_ok
    assert not (await cached.score(sample("fail"))).is_ok
    assert len(reward.asked) == 2


async def test_equal_requests_at_once_share_one_call_and_one_that_gives_up_takes_nothing_away(broker, keys):
    reward = Paid()
    reward.gate.clear()
    cached = named(broker, keys, reward)
    tasks = [asyncio.create_task(cached.score(sample("text", ticket))) for ticket in range(4)]
    await wait_until(lambda: reward.asked)
    tasks[0].cancel()
    await asyncio.wait({tasks[0]})
    reward.gate.set()
    parts = await asyncio.gather(*tasks[1:])
    assert reward.asked == ["text"]
    assert [score.value for score in parts] == [1.0] * 3


async def test_a_call_that_nobody_waits_for_any_more_is_paid_for_once_all_the_same(broker, keys):
    reward = Paid()
    reward.gate.clear()
    cached = named(broker, keys, reward)
    task = asyncio.create_task(cached.score(sample("text")))
    await wait_until(lambda: reward.asked)
    task.cancel()
    await asyncio.wait({task})
    reward.gate.set()
    assert (await cached.score(sample("text"))).is_ok
    assert len(reward.asked) == 1


async def test_the_bound_holds_and_what_was_not_used_for_longest_goes_first(broker, keys):
    values, used, size = keys.reward_cache
    await named(broker, keys, Paid()).score(sample("a"))
    entry_bytes = int(await broker.execute("HGET", size, "bytes"))
    await broker.execute("DEL", values, used, size)
    reward = Paid()
    cached = named(broker, keys, reward, max_bytes=3 * entry_bytes)
    for text in ("a", "b", "c", "a", "d"):  # `a` is used again, so `b` is the oldest
        await cached.score(sample(text))
    assert reward.asked == ["a", "b", "c", "d"]
    assert await broker.execute("HLEN", values) == await broker.execute("ZCARD", used) == 3
    for text in ("a", "c", "d", "b"):
        await cached.score(sample(text))
    assert reward.asked == ["a", "b", "c", "d", "b"]


async def test_bytes_are_bounded_too_and_counted_right(broker: Broker, keys: Keys) -> None:
    class Long(Paid):
        async def score(self, sample: RewardSample) -> RewardOutcome:
            return RewardOutcome(1.0, detail={"verdict": "x" * 200_000})

    cached = named(broker, keys, Long())
    for number in range(12):
        await cached.score(sample(str(number)))
    values, _, size = keys.reward_cache
    raw = await broker.execute("HGETALL", values)
    assert 0 < sum(map(len, raw)) <= 1 << 20
    assert int(await broker.execute("HGET", size, "bytes")) == sum(map(len, raw))


def test_another_model_makes_cached_verdicts_worthless_and_new_prices_or_gpus_do_not() -> None:
    judge = NamedRewardConfig.model_validate({"judge": {"servers": "s", "template": "x"}})
    servers = ServersConfig.model_validate({"model": "m", "local": {}})
    version = version_of("j", judge, servers)
    for field, value, is_same in (
        ("prices", {"prompt": 2.0}, True),
        ("limits", {"concurrency": 2}, True),
        ("local", {"gpus": [1], "count": 2}, True),
        ("local", {"args": ["--dtype", "half"]}, False),
        ("model", "other", False),
        ("base_urls", ["http://elsewhere:1"], False),
    ):
        changed = ServersConfig.model_validate(servers.model_dump() | {field: value})
        assert (version_of("j", judge, changed) == version) is is_same, field
