"""Rewards for tests: samples as they see them, any object with a `score` method under real attempts and
limits, functions that do what their sample says, servers of one address, a whole worker in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.config import NamedRewardConfig, RewardConfig
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.config.servers import LimitsConfig, ServersConfig
from tidemill.common.process.activity import Activity
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, group_status, read_range
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Lane, Score, Trajectory, TrajectoryKey
from tidemill.services.reward.functions.pool import ProcessPool
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.remote.limiter import Limiter
from tidemill.services.reward.remote.servers import Servers
from tidemill.services.reward.rewards.sandbox import SandboxReward
from tidemill.services.reward.rewards.weighted_sum import NamedReward, WeightedSum
from tidemill.services.reward.sample import RewardSample
from tidemill.services.reward.worker import Scorer, serve


def alone(reward: Any, config: RewardConfig) -> WeightedSum:
    """`reward` as the only one of a run, under the limits of its section."""
    (named,) = config.named.values()
    return WeightedSum([NamedReward("reward", named, reward)], is_named=False)


def together(rewards: dict[str, tuple[Any, dict[str, Any]]]) -> WeightedSum:
    """Several rewards by name, each with the fields of its own config."""
    return WeightedSum(
        [
            NamedReward(name, NamedRewardConfig(**({"function": "gsm8k", "backoff_s": 0.0} | fields)), reward)
            for name, (reward, fields) in rewards.items()
        ],
        is_named=True,
    )


def scorer_of(reward: Any, config: RewardConfig, worker: str = "w1", seed: int = 0) -> Scorer:
    return Scorer(alone(reward, config), config, worker, seed)


def code_reward(broker: Broker, keys: Keys, config: SandboxConfig) -> SandboxReward:
    """A reward of code; the Redis of its jobs is that of the environment."""
    dependencies: Any = SimpleNamespace(broker=broker, keys=keys)
    return SandboxReward("code", NamedRewardConfig(sandbox=config), dependencies)


def make_sample(
    key: TrajectoryKey = (0, 0),
    is_evaluation: bool = False,
    data_source: str = "",
    solution_str: str = "",
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    prompt_text: str = "",
    prompt_ids: Any = (),
    completion_ids: Any = (),
    **fields: Any,
) -> RewardSample:
    """A single turn with these fields, by the names that reward functions know."""
    trajectory = make_trajectory(
        *key,
        solution_str,
        data_source=data_source,
        ground_truth=ground_truth,
        extra=extra_info or {},
        prompt_text=prompt_text,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        completion_ids=np.array(completion_ids, dtype=np.int32),
        logprobs=np.zeros(len(completion_ids), dtype=np.float32),
        **fields,
    )
    return RewardSample(trajectory, Lane.EVAL if is_evaluation else Lane.TRAIN)


@contextlib.asynccontextmanager
async def worker(
    broker: Broker,
    keys: Keys,
    name: str = "w1",
    servers: Any = None,
    drain_s: float = 30.0,
    images: Any = None,
    run_dir: Path = Path(),
    **reward: Any,
) -> AsyncIterator[ServiceContext]:
    reward = {"backoff_s": 0.0, "processes": 1} | reward
    streams = {"lease_s": 1.0, "drain_s": drain_s}
    config = make_config(reward=reward, streams=streams, servers=servers or {}, images=images)
    context = ServiceContext("reward", name, keys, config, broker, run_dir, Activity("reward"))
    task = asyncio.create_task(serve(context))
    try:
        yield context
        context.stopping.set()
        await asyncio.wait_for(task, 120)
    finally:
        task.cancel()


def beat_of(context: ServiceContext) -> Heartbeat:
    """What a worker would say of itself now."""
    beat = Heartbeat("w1", "reward")
    for report in context.reporters:
        report(beat)
    return beat


def group(*texts: str, ticket: int = 0) -> list[Trajectory]:
    return [
        make_trajectory(ticket, index, text=text, group_size=len(texts)) for index, text in enumerate(texts)
    ]


async def scores(broker: Broker, keys: Keys, count: int, lane: Lane = Lane.TRAIN) -> list[Score]:
    """All scores once there are `count`, by index; there must not be more."""

    async def found() -> list[Score]:
        entries = await read_range(broker, keys.scores(lane), Score)
        scores = [entry.message for entry in entries if isinstance(entry, Entry)]
        return scores if len(scores) >= count else []

    scores = await wait_until(found)
    assert len(scores) == count
    return sorted(scores, key=lambda score: score.key)


async def num_pending(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN) -> int:
    status = await group_status(broker, keys.trajectories(lane), REWARD_GROUP)
    return -1 if status is None else status.pending


SOURCE = """
    import asyncio, ctypes, os, signal, subprocess, sys, threading, time
    from pathlib import Path

    FOLDER = Path({folder!r})

    def answer(started):
        is_main = threading.current_thread() is threading.main_thread()
        times = {{"started": started, "ended": time.monotonic()}}
        return {{"score": 1.0, "pid": os.getpid(), "main": is_main, **times}}

    def plain(data_source, solution_str, ground_truth, extra_info=None):
        started = time.monotonic()
        (FOLDER / f"{{ground_truth}}.pid").write_text(str(os.getpid()))
        exec(solution_str)
        return answer(started)

    async def awaited(data_source, solution_str, ground_truth, extra_info=None):
        started = time.monotonic()
        (FOLDER / f"{{ground_truth}}.pid").write_text(str(os.getpid()))
        found = {{}}
        body = "".join(f"    {{line}}\\n" for line in solution_str.split("\\n"))
        exec("async def code():\\n" + body, globals(), found)
        await found["code"]()
        return answer(started)
"""


def obedient_functions(folder: Path) -> Path:
    """A file with `plain` and `awaited`, which run their sample's text as code."""
    path = folder / "obedient.py"
    path.write_text(dedent(SOURCE).format(folder=str(folder)))
    return path


HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(3600)"
"""Sleeps with the GIL, like a regular expression that never ends: no other thread of the process can run."""


class Pool(ProcessPool):
    """Processes that are asked for one sample at a time."""

    def __init__(self, reference: str, size: int = 1, threads: int = 1, is_async: bool = False) -> None:
        spec = {"maker": f"{load_function.__module__}:load_function", "reference": reference, "kwargs": {}}
        super().__init__(spec, size, threads, is_async)

    async def score(
        self, code: str, timeout_s: float = 60, name: str = "sample", index: int = 0
    ) -> RewardOutcome:
        (outcome,) = await self.run(Request([make_sample((0, index), False, "", code, name)]), timeout_s)
        return outcome


def peak(outcomes: Sequence[RewardOutcome | Score]) -> int:
    """How many of the calls ran at once, at most."""
    moments = [(float(outcome.components["started"] or 0), 1) for outcome in outcomes]
    moments += [(float(outcome.components["ended"] or 0), -1) for outcome in outcomes]
    running = 0
    highest = 0
    for _, change in sorted(moments):
        running += change
        highest = max(highest, running)
    return highest


class _NoKeys:
    def limits(self, servers: str) -> str:
        return servers

    requests = limits


def servers_at(url: str, http: httpx.AsyncClient, **fields: Any) -> Servers:
    config = ServersConfig.model_validate({"base_urls": [url], **fields})
    limiter = Limiter(None, _NoKeys(), "there", LimitsConfig())  # type: ignore[arg-type]
    return Servers("there", config, http, limiter)


def dependencies_of(servers: Any, **reward: Any) -> Any:
    """The dependencies of a reward that uses these servers."""
    config = SimpleNamespace(reward=RewardConfig(**reward))
    return SimpleNamespace(servers=lambda _: servers, config=config, pictures=None)


async def announce_replica(broker: Broker, keys: Keys, servers: str, url: str) -> Heartbeat:
    """Publish the heartbeat of a replica that takes requests at `url`; returns it."""
    beat = Heartbeat(f"replica-{url}", "replica", servers=servers, url=url)
    await publish_heartbeat(broker, keys, beat)
    return beat
